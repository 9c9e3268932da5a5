"""Faults are values: a seed draws the same ones again, and a file gives back what was written."""

import pytest

from atoll.core.errors import ConfigError
from atoll.testing.chaos import LIGHTHOUSE, At, Cut, Freeze, FullDisk, Kill, Script, Slow, Spoil, at_random, spoils_at_random

NAMES = [f"island-{number:04d}" for number in range(8)]


def drawn(seed):
    return at_random(seed=seed, victims=NAMES, every_s=20.0, until_s=600.0, kinds=(Kill, Freeze), for_s=3.0)


def test_the_same_seed_draws_the_same_faults_and_another_seed_others():
    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_ten_minutes_of_a_fault_every_twenty_seconds_are_twenty_nine():
    moments = [one.at_s for one in drawn(0)]
    assert moments == [20.0 * number for number in range(1, 30)]


def test_everybody_is_hit_sooner_or_later_and_in_both_ways():
    faults = [one.fault for one in drawn(0)]
    assert {fault.victim for fault in faults} == set(NAMES)
    assert {type(fault) for fault in faults} == {Kill, Freeze}


def test_all_kinds_can_be_drawn_and_hit_what_they_can_hit():
    kinds = (Kill, Freeze, FullDisk, Cut, Slow)
    faults = [
        one.fault for one in at_random(seed=0, victims=NAMES, lines=["line"], every_s=1.0, until_s=60.0, kinds=kinds, for_s=3.0)
    ]
    assert {type(fault) for fault in faults} == set(kinds)
    assert {fault.line for fault in faults if isinstance(fault, Cut | Slow)} == {"line"}
    assert {fault.for_s for fault in faults if not isinstance(fault, Kill)} == {3.0}


def test_what_nothing_can_be_hit_by_is_refused():
    with pytest.raises(ConfigError, match=r"Cut.*need lines"):
        at_random(seed=0, victims=NAMES, every_s=20.0, until_s=60.0, kinds=(Cut,))
    with pytest.raises(ConfigError, match="other kinds victims"):
        at_random(seed=0, lines=["line"], every_s=20.0, until_s=60.0)


def test_spoils_are_drawn_for_even_rounds_and_of_all_kinds():
    spoils = spoils_at_random(seed=1, islands=NAMES, every=5, until=300)
    assert (
        spoils
        == spoils_at_random(seed=1, islands=NAMES, every=5, until=300)
        != spoils_at_random(seed=2, islands=NAMES, every=5, until=300)
    )
    assert [spoil.round for spoil in spoils] == list(range(5, 300, 5))
    assert {spoil.how for spoil in spoils} == {"damage", "damage late", "damage told", "die", "die late", "nan", "huge"}


def test_a_scripts_victims_are_all_processes_that_it_hits():
    spoils = (Spoil(island="b", round=1, how="nan"),)
    script = Script(faults=(At(at_s=1, fault=Kill(victim="a")), At(at_s=1, fault=Cut(line="line", for_s=1))), spoils=spoils)
    assert script.victims == {"a", "b"}


def test_a_script_is_the_same_after_it_was_a_text():
    faults = (
        At(at_s=1.0, fault=Kill(victim=LIGHTHOUSE)),
        At(at_s=2.0, fault=Freeze(victim="island-0000", for_s=5.0)),
        At(at_s=3.0, fault=FullDisk(victim="island-0000", file_bytes=10, for_s=5.0)),
        At(at_s=4.0, fault=Cut(line="line", for_s=5.0)),
        At(at_s=5.0, fault=Slow(line="line", mbit_per_s=1.0, for_s=5.0)),
    )
    script = Script(faults=faults, spoils=(Spoil(island="island-0001", round=3, how="damage late"),))
    assert Script.from_text(script.to_text()) == script


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "no script of faults"),
        ('{"faults": [{"at_s": 1, "fault": "Flood"}]}', "Flood.*Kill, Freeze"),
        ('{"faults": [{"at_s": 1, "fault": "Kill"}]}', "Kill is given.*victim"),
        ('{"spoils": [{"island": "island-0000", "round": 1, "how": "spill"}]}', "spill"),
        ('{"faults": [{"fault": "Kill", "victim": "a"}]}', "has no at_s"),
        ('{"faults": [{"at_s": "soon", "fault": "Kill", "victim": "a"}]}', "at_s='soon' in At.*number"),
        ('{"faults": [{"at_s": 1, "fault": "Freeze", "victim": "a", "for_s": "ten"}]}', "for_s='ten' in Freeze"),
        ('{"faults": [{"at_s": 1, "fault": "Freeze", "victim": "a", "for_s": -1}]}', "0 or more"),
        ('{"faults": [{"at_s": 1, "fault": "Kill", "victim": 7}]}', "victim=7 in Kill: it is a name"),
        ('{"faults": ["Kill"]}', "no script of faults"),
        ('{"faults": 3}', "no script of faults"),
    ],
)
def test_a_script_that_says_nonsense_is_refused_with_what_is_allowed(text, said):
    with pytest.raises(ConfigError, match=said):
        Script.from_text(text)
