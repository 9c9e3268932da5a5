import json
import math
from dataclasses import fields, replace
from typing import get_type_hints

import pytest
from hypothesis import given, settings, strategies as st

from atoll.core.errors import AtollError
from atoll.core.events import (
    KINDS as KINDS_BY_NAME,
    Compared,
    Evaluated,
    Event,
    Exchanged,
    Progress,
    RoundFinished,
    RunFinished,
    RunStarted,
    Saved,
    Timed,
    read_event,
)

KINDS = list(KINDS_BY_NAME.values())
TEXT = st.text(st.characters(codec="utf-8"), max_size=10).filter(lambda text: text not in ("NaN", "Infinity", "-Infinity"))


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def events(kind: type[Event]) -> st.SearchStrategy[Event]:
    """Events of this kind with any figures, and any text that is not that of a number."""
    return st.builds(kind, **{name: TEXT for name, hint in get_type_hints(kind).items() if hint is str})


def round_finished(loss: float) -> RoundFinished:
    return RoundFinished(
        round=3, islands=2, steps=40, virtual_time_s=0.1, tokens=4096, local_updates=80, loss=loss, sent_bytes_per_island=1e6
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_reads_back_as_it_was_written(kind):
    @settings(max_examples=25, deadline=None)
    @given(events(kind))
    def reads_back(event: Event) -> None:
        line = event.to_json()
        back = read_event(line)
        assert type(back) is kind
        assert repr(back) == repr(event)  # NaN differs from itself; its text does not
        assert back.to_json() == line

    reads_back()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_is_one_line_of_strict_json_that_names_itself_first(kind):
    @settings(max_examples=10, deadline=None)
    @given(events(kind))
    def is_one_line(event: Event) -> None:
        line = event.to_json()
        record = json.loads(line, parse_constant=no_constant)
        assert "\n" not in line
        times = ("virtual_time_s", "wall_time_s", "unix_time_s")
        names = [*(f.name for f in fields(kind) if f.name not in times), *times]
        assert list(record) == ["event", *(name for name in names if name in record)]
        assert {field.name for field in fields(kind)} - set(record) <= {"wall_time_s", "unix_time_s"}
        assert record["event"] == kind.__name__

    is_one_line()


def test_the_text_of_an_event_is_stable():
    assert round_finished(loss=2.5).to_json() == (
        '{"event": "RoundFinished", "round": 3, "islands": 2, "steps": 40, "tokens": 4096, '
        '"local_updates": 80, "loss": 2.5, "sent_bytes_per_island": 1000000.0, "virtual_time_s": 0.1}'
    )


def test_a_moment_on_real_machines_is_written_beside_a_virtual_time_of_null():
    measured = replace(round_finished(loss=2.5), virtual_time_s=None, wall_time_s=0.25)
    assert ', "virtual_time_s": null, "wall_time_s": 0.25}' in measured.to_json()
    assert read_event(measured.to_json()) == measured


def test_the_time_of_an_event_is_on_the_clock_that_counts():
    simulated = round_finished(loss=2.5)
    assert simulated.time_s == 0.1
    assert replace(simulated, virtual_time_s=None, wall_time_s=0.25).time_s == 0.25
    assert replace(simulated, virtual_time_s=0.0).time_s == 0.0


def test_an_event_without_a_time_says_so_when_it_is_asked_for_one():
    with pytest.raises(AtollError, match="RoundFinished has neither virtual_time_s nor wall_time_s"):
        _ = replace(round_finished(loss=2.5), virtual_time_s=None).time_s


def test_every_event_with_a_virtual_time_has_a_wall_time_too():
    names = {kind: {field.name for field in fields(kind)} for kind in KINDS}
    timed = [kind for kind in KINDS if "virtual_time_s" in names[kind]]
    assert timed == [kind for kind in KINDS if "wall_time_s" in names[kind]]
    assert timed == [kind for kind in KINDS if issubclass(kind, Timed)]


def test_a_log_that_names_no_engine_was_simulated():
    line = '{"event": "RunStarted", "recipe": "r", "algorithm": "DDP", "islands": 1, "params": 1, "steps": 1, "seed": 0}'
    started = read_event(line)
    assert isinstance(started, RunStarted)
    assert started.engine == "simulator"


def test_floats_are_written_to_the_last_bit():
    for loss in (0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0):
        back = read_event(round_finished(loss).to_json())
        assert isinstance(back, RoundFinished)
        assert back.loss.hex() == loss.hex()


@pytest.mark.parametrize(("value", "text"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_what_is_not_finite_is_written_as_text_and_read_back_as_a_number(value, text):
    line = round_finished(value).to_json()
    assert f'"loss": {{"float": "{text}"}}' in line
    back = read_event(line)
    assert isinstance(back, RoundFinished)
    assert repr(back.loss) == repr(value)


def test_what_is_not_finite_survives_inside_lists_and_mappings():
    compared = Compared(round=0, norms=[math.nan, math.inf, 1.0], mean_norm=1.0, cosine_mean=None, cosine_std=None)
    evaluated = Evaluated(
        round=0, steps=0, virtual_time_s=0.0, tokens=0, local_updates=0, sent_bytes_per_island=0.0, metrics={"loss": -math.inf}
    )
    for event in (compared, evaluated):
        assert repr(read_event(event.to_json())) == repr(event)


def test_none_stays_none():
    finished = RunFinished(
        rounds=1,
        outer_steps=1,
        steps=1,
        tokens=1,
        warm_start_tokens=0,
        local_updates=1,
        virtual_time_s=None,
        utilisation=None,
        sent_bytes_per_island=0.0,
        control_bytes_per_island=0.0,
        val_loss=1.0,
        digest="",
    )
    assert read_event(finished.to_json()) == finished


def test_truth_values_stay_truth_values():
    exchanged = Exchanged(
        round=0,
        what="mean",
        islands=[0, 1],
        heard=[True, False],
        arrived_s=[0.0, 1.0],
        start_s=1.0,
        end_s=2.0,
        sent_bytes=[4, 4],
        control_bytes=[0, 0],
        weight=1.0,
    )
    back = read_event(exchanged.to_json())
    assert isinstance(back, Exchanged)
    assert back.heard[0] is True


def test_everything_but_progress_is_recorded():
    assert [kind for kind in KINDS if not kind.recorded] == [Progress]


def test_events_with_the_same_figures_are_equal():
    assert round_finished(2.5) == round_finished(2.5)
    assert round_finished(2.5) != round_finished(2.6)


def test_text_that_reads_like_a_number_stays_text():
    assert read_event(Saved(round=1, name="NaN").to_json()) == Saved(round=1, name="NaN")
