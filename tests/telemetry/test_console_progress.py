"""The console shows bars on a terminal, few plain lines elsewhere, nothing when quiet, and never uses standard output."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count

import pytest
from rich.console import Console

from atoll.core.events import (
    Attended,
    CaughtUp,
    Dispatched,
    Evaluated,
    Event,
    IslandJoined,
    IslandLeft,
    Progress,
    Refused,
    Returned,
    RoundFailed,
    RoundFinished,
    RunStarted,
    Saved,
    UpdateSkipped,
)
from atoll.telemetry.console_progress import ConsoleSink, event_text
from atoll.telemetry.units import human_bytes, human_time


def show(events: Iterable[Event], *, tick_s: float = 0.1, terminal: bool = False, width: int = 100) -> str:
    """What the sink writes for these events, one per tick."""
    file, ticks = io.StringIO(), count()
    console = Console(file=file, width=width, force_terminal=terminal, color_system=None, legacy_windows=False)
    with ConsoleSink("demo", console=console, clock=lambda: next(ticks) * tick_s) as sink:
        for event in events:
            sink.emit(event)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


def warm_start(steps: int) -> Iterator[Progress]:
    return (Progress(phase="warm start", done=done, total=steps, note=f"loss {9 - done / steps:.2f}") for done in range(steps + 1))


def figures_of_round(run, number: int) -> str:
    """What stands beside the bar after a round: its own loss, and the validation loss of the round before."""
    total_s = number * run.round_s
    losses = f"loss {run.loss(number) + 0.1:.3f}  val {run.loss(number - 1):.3f}"
    busy = 100 * sum(run.computed_s) / run.islands / (run.rounds * run.round_s)
    return f"{losses}  virtual time {human_time(total_s)}  {human_bytes(number * run.payload_bytes)} per island  busy {busy:.0f} %"


def test_a_pipe_gets_a_line_every_tenth_of_a_phase() -> None:
    lines = show(warm_start(1000), tick_s=1e-6).splitlines()
    assert [line.split("  ")[1] for line in lines] == ["0 %", *(f"{tenth}0 %" for tenth in range(1, 11))]
    assert lines[5] == "demo: warm start  50 %  loss 8.50"


def test_a_pipe_gets_few_lines_however_long_the_run() -> None:
    week = (Progress(phase="train", done=done, total=10**9) for done in range(60_000))
    assert 20 < len(show(week, tick_s=10.0).splitlines()) < 600


def test_a_whole_run_reads_as_expected_in_a_file(script) -> None:
    run = script(recipe="demo-ddp", rounds=10, islands=2)
    text = show(run.events(), tick_s=0.001)
    assert "demo-ddp: DDP on 2 islands, 12.3 k parameters, 50 steps each, seed 0\n" in text
    assert "warm start: 10 steps, 4.00 k tokens, loss 4.5\n" in text
    assert "round 10, step 50: val loss 2.35, perplexity 10.49, accuracy 0.1, 10.0 k tokens\n" in text
    assert f"demo: training  100 %  {figures_of_round(run, 10)}\n" in text
    assert text.endswith("10.0 kB sent per island, 0:01:22 of virtual time, 68 % of it computing\n")
    finished = replace([*run.events()][-1], busiest_second_bytes=2000.0)
    assert "10.0 kB sent per island (at most 2.00 kB in a second), 0:01:22" in show([finished])


def test_joining_and_leaving_islands_have_a_line() -> None:
    joined = IslandJoined(island=2, round=5, virtual_time_s=61.0, donor=0, sent_bytes=4096)
    text = show([joined, IslandLeft(island=1, round=6, virtual_time_s=75.0)])
    assert text == "round 5: island 2 joined at 0:01:01, 4.10 kB from island 0\nround 6: island 1 left at 0:01:15\n"


def test_an_island_that_caught_up_without_a_donor_has_a_line() -> None:
    assert show([CaughtUp(island=2, donor=None, round=5, start_s=1.0, end_s=1.0, sent_bytes=0)]) == "round 5: island 2 caught up\n"


def test_lines_about_checkpoints_are_rate_limited_and_count_the_withheld_ones() -> None:
    lines = show((Saved(round=number, name=f"round-{number}") for number in range(700)), tick_s=0.1).splitlines()
    second = re.fullmatch(r"round (\d+): saved round-\1 \(and (\d+) more since the last such line\)", lines[1])
    assert lines[0] == "round 0: saved round-0"
    assert len(lines) == 2
    assert int(second[1]) == int(second[2]) + 1 == pytest.approx(600, abs=2)


def attended(round_: int, participating: int) -> Attended:
    fields = {"known": 3, "alive": 3, "attempts": 1, "epoch": round_, "digest": "", "virtual_time_s": None, "wall_time_s": 0.0}
    return Attended(round=round_, participating=participating, **fields)


def test_a_quorum_without_an_island_has_a_line_once_and_the_next_change_counts_its_commits() -> None:
    away = [attended(number, 2) for number in range(1, 854)]
    text = show([*away, attended(854, 3), *(attended(number, 1) for number in range(855, 900))], tick_s=10.0)
    assert text == (
        "round 1: 2 of 3 live islands committed (3 known)\n"
        "round 855: 1 of 3 live islands committed (3 known) (and 852 more since the last such line)\n"
    )


def test_a_resumed_run_shows_how_far_it_is_by_the_progress_of_the_engine(script) -> None:
    rounds = [event for event in script(rounds=10).events() if isinstance(event, RoundFinished)]
    assert "training  ..." in show(rounds[6:])
    resumed = Progress(phase="resume", done=30, total=50, note="from round 6")
    lines = show([resumed, *rounds[6:]]).splitlines()
    assert lines[0] == "demo: training  60 %  from round 6"
    assert lines[-1].startswith("demo: training  100 %  loss")


def test_a_terminal_gets_one_bar_per_phase_with_the_figures_below(script) -> None:
    run = script(rounds=10)
    events = list(run.events())
    text = show([events[0], *warm_start(10), *events[1:-1]], terminal=True, width=80)
    last = text[text.rindex("demo: warm start") :].splitlines()
    assert re.fullmatch(r"demo: warm start ━+ 100% \d\d:\d\d", last[0].rstrip())
    assert re.fullmatch(r"demo: training   ━+ 100% \d\d:\d\d", last[1].rstrip())
    assert last[2].rstrip() == figures_of_round(run, 10)


def test_progress_within_a_round_moves_the_training_bar_and_keeps_the_figures(script) -> None:
    run = script(rounds=10)
    started, *events = run.events()
    first = next(event for event in events if isinstance(event, RoundFinished))
    text = show([started, first, Progress(phase="train", done=17, total=50)], terminal=True)
    assert len(re.findall("demo: training", text[text.rindex("demo: training") :])) == 1
    assert " 34% " in text
    assert f"loss {run.loss(1) + 0.1:.3f}" in text[text.rindex("34%") :]


def test_the_last_line_stands_below_the_bars(script) -> None:
    text = show(script().events(), terminal=True)
    assert text.rindex("demo: training") < text.rindex("finished: val loss 2.35")


def test_names_are_shown_as_they_are_and_not_taken_for_markup() -> None:
    started = RunStarted(recipe="[red]run[/red]", algorithm="DDP", islands=1, params=1, steps=1, seed=0)
    assert "[red]run[/red]: DDP on 1 island," in show([started])


def test_a_quiet_sink_writes_nothing(script, capfd) -> None:
    with ConsoleSink("demo", quiet=True) as sink:
        for event in script().events():
            sink.emit(event)
    assert capfd.readouterr() == ("", "")


def test_standard_output_is_left_for_results(script, capsys) -> None:
    with ConsoleSink("demo") as sink:
        for event in script().events():
            sink.emit(event)
    written = capsys.readouterr()
    assert written.out == ""
    assert "finished: val loss 2.35" in written.err


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_that_was_evaluated_thousands_of_times_does_not_flood_the_screen(script, terminal: bool) -> None:
    evaluation = next(event for event in script().events() if isinstance(event, Evaluated))
    text = show([evaluation] * 3000, terminal=terminal, tick_s=0.001)
    assert text.count("val loss") == 20


# ------------------------------------------------------------------------------------------------------------- with a hub


def test_a_run_with_a_hub_shows_updates_staleness_and_workers(async_script) -> None:
    run = async_script(rounds=30)
    lines = [line for line in show(run.events(), tick_s=0.001).splitlines() if "training" in line]
    assert lines[-1].startswith("demo: training  100 %  loss 2.000  val 2.300  updates 150/150  staleness ")
    assert re.search(r"staleness \d\.\d  3 workers  virtual time 0:01:3\d  10\.0 kB per island  busy \d\d %$", lines[-1])


def test_updates_beyond_those_asked_for_are_not_shown(async_script) -> None:
    more = [
        replace(e, local_updates=e.local_updates + 5) if isinstance(e, RoundFinished) else e
        for e in async_script(rounds=30).events()
    ]
    assert "updates 150/150" in [line for line in show(more, tick_s=0.001).splitlines() if "training" in line][-1]


@pytest.mark.parametrize("terminal", [True, False])
def test_thousands_of_arrivals_do_not_flood_the_screen(async_script, terminal: bool) -> None:
    run = async_script(rounds=3000)
    events = [event for event in run.events() if not isinstance(event, Evaluated)]
    assert len(show(events, terminal=terminal, tick_s=1e-4).splitlines()) < 40


def test_a_bar_never_goes_back_when_a_worker_leaves(async_script) -> None:
    """Steps of each worker would: they are local updates over the workers present."""
    started, *events = async_script(rounds=10, step_s=(1.0, 1.0)).events()
    rounds = [event for event in events if isinstance(event, Dispatched | RoundFinished)]
    halved = [replace(e, islands=1, steps=2 * e.steps) if isinstance(e, RoundFinished) and e.round == 3 else e for e in rounds]
    shares = [int(share) for share in re.findall(r"training  (\d+) %", show([started, *halved], tick_s=10.0))]
    assert shares == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]


def test_a_resumed_run_with_a_hub_shows_the_progress_of_the_engine(async_script) -> None:
    events = [event for event in async_script(rounds=10).events() if isinstance(event, Dispatched | RoundFinished)]
    text = show([Progress(phase="resume", done=30, total=50, note="from round 6"), *events[-4:]], tick_s=10.0)
    assert text.splitlines()[-1].startswith("demo: training  60 %  loss 4.000  updates 50  3 workers")


def test_refused_and_returned_rounds_have_a_line() -> None:
    refused = Refused(island=2, round=7, virtual_time_s=61.0, reason="it holds NaN")
    returned = Returned(island=1, round=9, shard=4, steps=50, virtual_time_s=75.0)
    assert show([refused, returned]).splitlines() == [
        "round 7: the update of island 2 was refused at 0:01:01 (it holds NaN)",
        "round 9: island 1 sent no update, 50 steps of shard 4 are assigned again",
    ]


def test_skipped_updates_and_failed_rounds_have_a_line() -> None:
    out = show(
        [
            UpdateSkipped(round=3, islands=[1], virtual_time_s=2.0),
            UpdateSkipped(round=3, islands=[], virtual_time_s=2.5),
            RoundFailed(round=4, what="all_gather", islands=[0, 2], virtual_time_s=3.0),
        ]
    )
    assert "round 3: gradients of island 1 are not finite, so all islands skip the update" in out
    assert "round 3: there are no gradients, so all islands skip the update" in out
    assert "round 4: failed, all_gather was missed by island 0, 2" in out


def test_recalled_events_are_counted_and_not_shown() -> None:
    started = RunStarted(recipe="demo", algorithm="DiLoCo", islands=2, params=10, steps=8, seed=0)
    judged = Evaluated(
        round=1, steps=2, virtual_time_s=2.0, tokens=8, local_updates=4, sent_bytes_per_island=8.0, metrics={"loss": 2.5}
    )
    later = RoundFinished(
        round=2, islands=2, steps=4, virtual_time_s=4.0, tokens=16, local_updates=8, loss=2.25, sent_bytes_per_island=16.0
    )
    file = io.StringIO()
    with ConsoleSink("demo", console=Console(file=file, width=100, color_system=None), clock=lambda: 0.0) as sink:
        sink.recall([started, judged])
        assert file.getvalue() == ""
        sink.emit(later)
    assert file.getvalue().startswith("demo: training  50 %  loss 2.250  val 2.500")


def test_a_commit_without_all_live_islands_has_a_line() -> None:
    commit = Attended(
        round=2, known=4, alive=3, participating=3, attempts=1, epoch=2, digest="0", virtual_time_s=None, wall_time_s=2.0
    )
    assert event_text(commit) is None
    partial = replace(commit, participating=2, attempts=3)
    assert event_text(partial) == "round 2: 2 of 3 live islands committed (4 known), at attempt 3"
