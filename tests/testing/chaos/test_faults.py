"""A seed draws the same faults again, and a script survives a round trip through JSON."""

import pytest

from atoll.core.errors import ConfigError
from atoll.testing.chaos.faults import (
    LIGHTHOUSE,
    Cut,
    CutOneWay,
    CutPair,
    FaultScript,
    Freeze,
    FullDisk,
    Kill,
    LinkFault,
    Slow,
    TimedFault,
    UpdateFault,
    random_faults,
    random_update_faults,
)

NAMES = [f"island-{number:04d}" for number in range(8)]


def draw(seed):
    return random_faults(seed=seed, victims=NAMES, every_s=20.0, until_s=600.0, kinds=(Kill, Freeze), for_s=3.0)


def test_the_same_seed_draws_the_same_faults_and_another_seed_others():
    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_ten_minutes_with_a_fault_every_20_s_have_29_faults():
    moments = [one.at_s for one in draw(0)]
    assert moments == [20.0 * number for number in range(1, 30)]


def test_all_victims_and_kinds_are_drawn():
    faults = [one.fault for one in draw(0)]
    assert {fault.victim for fault in faults} == set(NAMES)
    assert {type(fault) for fault in faults} == {Kill, Freeze}


def test_process_faults_draw_victims_and_link_faults_draw_links():
    kinds = (Kill, Freeze, FullDisk, Cut, CutOneWay, CutPair, Slow)
    faults = [
        one.fault
        for one in random_faults(seed=0, victims=NAMES, links=["link", "line"], every_s=1.0, until_s=60.0, kinds=kinds, for_s=3.0)
    ]
    assert {type(fault) for fault in faults} == set(kinds)
    assert {fault.link for fault in faults if isinstance(fault, LinkFault)} == {"link", "line"}
    assert all(fault.link != fault.other for fault in faults if isinstance(fault, CutPair))
    assert {fault.for_s for fault in faults if not isinstance(fault, Kill)} == {3.0}


def test_kinds_without_targets_are_refused():
    with pytest.raises(ConfigError, match=r"Cut.*need links"):
        random_faults(seed=0, victims=NAMES, every_s=20.0, until_s=60.0, kinds=(Cut,))
    with pytest.raises(ConfigError, match=r"CutPair needs two"):
        random_faults(seed=0, links=["link"], every_s=20.0, until_s=60.0, kinds=(CutPair,))
    with pytest.raises(ConfigError, match="other kinds victims"):
        random_faults(seed=0, links=["link"], every_s=20.0, until_s=60.0)


def test_update_faults_are_drawn_for_every_nth_round_and_of_all_kinds():
    update_faults = random_update_faults(seed=1, islands=NAMES, every=5, until=300)
    assert (
        update_faults
        == random_update_faults(seed=1, islands=NAMES, every=5, until=300)
        != random_update_faults(seed=2, islands=NAMES, every=5, until=300)
    )
    assert [fault.round for fault in update_faults] == list(range(5, 300, 5))
    assert {fault.kind for fault in update_faults} == {
        "corrupt_delta",
        "corrupt_mean",
        "corrupt_weight",
        "kill_in_delta",
        "kill_in_mean",
        "nan",
        "huge",
    }


def test_victims_are_all_processes_that_the_script_hits():
    update_faults = (UpdateFault(island="b", round=1, kind="nan"),)
    script = FaultScript(
        faults=(TimedFault(at_s=1, fault=Kill(victim="a")), TimedFault(at_s=1, fault=Cut(link="link", for_s=1))),
        update_faults=update_faults,
    )
    assert script.victims == {"a", "b"}


def test_a_script_survives_a_round_trip_through_json():
    faults = (
        TimedFault(at_s=1.0, fault=Kill(victim=LIGHTHOUSE)),
        TimedFault(at_s=2.0, fault=Freeze(victim="island-0000", for_s=5.0)),
        TimedFault(at_s=3.0, fault=FullDisk(victim="island-0000", file_bytes=10, for_s=5.0)),
        TimedFault(at_s=4.0, fault=Cut(link="link", for_s=5.0)),
        TimedFault(at_s=5.0, fault=Slow(link="link", mbit_per_s=1.0, for_s=5.0)),
        TimedFault(at_s=6.0, fault=CutOneWay(link="link", for_s=5.0)),
        TimedFault(at_s=7.0, fault=CutPair(link="link", other="line", for_s=5.0)),
    )
    script = FaultScript(faults=faults, update_faults=(UpdateFault(island="island-0001", round=3, kind="corrupt_mean"),))
    assert FaultScript.from_text(script.to_text()) == script


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "no fault script"),
        ('{"faults": [{"at_s": 1, "fault": "Flood"}]}', "Flood.*Kill, Freeze"),
        ('{"faults": [{"at_s": 1, "fault": "Kill"}]}', "Kill has the fields.*victim"),
        ('{"update_faults": [{"island": "island-0000", "round": 1, "kind": "spill"}]}', "spill"),
        ('{"faults": [{"fault": "Kill", "victim": "a"}]}', "has no at_s"),
        ('{"faults": [{"at_s": "soon", "fault": "Kill", "victim": "a"}]}', "TimedFault: at_s='soon' is not a number"),
        ('{"faults": [{"at_s": 1, "fault": "Freeze", "victim": "a", "for_s": "ten"}]}', "Freeze: for_s='ten'"),
        ('{"faults": [{"at_s": 1, "fault": "Freeze", "victim": "a", "for_s": -1}]}', "0 or more"),
        ('{"faults": [{"at_s": 1, "fault": "Kill", "victim": 7}]}', "Kill: victim=7 is not text"),
        ('{"faults": ["Kill"]}', "no fault script"),
        ('{"faults": 3}', "no fault script"),
    ],
)
def test_an_invalid_script_is_refused_with_what_is_allowed(text, said):
    with pytest.raises(ConfigError, match=said):
        FaultScript.from_text(text)


def test_the_json_of_a_script():
    script = FaultScript(faults=(TimedFault(at_s=5.0, fault=Kill(victim="island-0001")),))
    assert script.to_text() == '{"faults": [{"at_s": 5.0, "fault": "Kill", "victim": "island-0001"}], "update_faults": []}'


def test_a_seed_draws_these_faults():
    faults = random_faults(seed=7, victims=["island-0000", "island-0001"], every_s=20.0, until_s=60.0)
    assert [(one.at_s, one.fault) for one in faults] == [(20.0, Kill(victim="island-0000")), (40.0, Kill(victim="island-0001"))]
