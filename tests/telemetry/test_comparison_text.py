"""The sentence says what the figures say, also when they are unwelcome."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from atoll.telemetry import OverlapSummary, Summary, read_summary
from atoll.telemetry.comparison_text import Row, losses_as_text, reference, verdict

DDP = Summary(
    recipe="ddp",
    algorithm="DDP",
    islands=4,
    params=1000,
    tokens=10_000,
    warm_start_tokens=0,
    local_updates=100,
    outer_steps=100,
    val_loss=2.35,
    val_perplexity=10.5,
    virtual_time_s=100.0,
    wall_time_s=1.0,
    sent_bytes_per_island=20_000.0,
    control_bytes_per_island=0.0,
    utilisation=0.5,
    resumed_from_round=0,
    run_dir="ddp",
    seed=0,
    rounds=100,
    steps=100,
    digest="00",
)
DILOCO = replace(DDP, recipe="diloco", val_loss=2.31, sent_bytes_per_island=1000.0, virtual_time_s=61.0)


def tell(*summaries: Summary) -> str:
    return verdict([Row(label=summary.recipe, summary=summary) for summary in summaries])


def test_a_better_run_is_told_with_its_price() -> None:
    assert tell(DDP, DILOCO) == "diloco reaches 2.31 against ddp's 2.35 with 1/20 of the bytes in 0.61 of the time."


def test_the_order_of_two_runs_does_not_matter() -> None:
    assert tell(DDP, DILOCO) == tell(DILOCO, DDP)


def test_a_worse_run_is_called_worse() -> None:
    worse = replace(DILOCO, val_loss=2.40, virtual_time_s=140.0)
    assert tell(DDP, worse) == "diloco ends 0.05 worse than ddp (2.40 against 2.35), with 1/20 of the bytes in 1.4 times the time."


def test_the_difference_told_is_that_of_the_losses_told() -> None:
    assert "ends 0.23 worse than ddp (3.12 against 2.89)" in tell(replace(DDP, val_loss=2.886), replace(DILOCO, val_loss=3.123))


def test_losses_that_differ_in_the_fourth_digit_are_told_apart() -> None:
    assert "2.352 against 2.350" in tell(DDP, replace(DILOCO, val_loss=2.352))


def test_losses_that_four_digits_do_not_tell_apart_match() -> None:
    assert tell(DDP, replace(DILOCO, val_loss=2.3501)).startswith("diloco matches ddp's 2.35 with")


def test_equal_bytes_and_times_are_called_the_same() -> None:
    same = replace(DILOCO, sent_bytes_per_island=19_999.0, virtual_time_s=100.1)
    assert tell(DDP, same).endswith("with the same bytes in the same time.")


def test_an_unknown_time_is_left_out() -> None:
    assert tell(DDP, replace(DILOCO, virtual_time_s=None)).endswith("with 1/20 of the bytes.")


def test_runs_that_send_nothing_are_told_without_a_ratio() -> None:
    quiet = replace(DDP, sent_bytes_per_island=0.0)
    assert "with nothing sent in 0.61 of the time" in tell(quiet, replace(DILOCO, sent_bytes_per_island=0.0))


def test_a_diverged_run_is_called_so_on_either_side() -> None:
    assert tell(DDP, replace(DILOCO, val_loss=math.nan)).startswith(
        "diloco diverged (its loss is NaN) where ddp reaches 2.35, with"
    )
    assert tell(replace(DDP, val_loss=math.inf), DILOCO).startswith("diloco reaches 2.31 where ddp diverged, with 1/20")


@pytest.mark.parametrize("tokens", [9000, 11_000])
def test_runs_on_different_numbers_of_tokens_are_not_compared(tokens: int) -> None:
    told = tell(DDP, replace(DILOCO, tokens=tokens))
    assert told.startswith("These runs are not comparable, because they trained on different numbers of tokens: ddp saw 10.0 k")
    assert "2.3" not in told


def test_the_last_round_of_a_run_with_a_hub_may_go_past_the_end(tmp_path, async_script) -> None:
    """Rounds of 5 steps with 100 tokens each: a run that was asked for 2500 tokens may have seen up to 3000."""
    hub = read_summary(async_script(rounds=6).write(tmp_path / "run"))
    assert hub.tokens == 3000
    assert "not comparable" not in tell(replace(DDP, tokens=2500, params=hub.params), hub)
    assert "not comparable" in tell(replace(DDP, tokens=2400, params=hub.params), hub)
    assert "not comparable" in tell(replace(DDP, tokens=3100, params=hub.params), hub), "it never stops short of it"
    assert "not comparable" in tell(replace(DDP, tokens=2500, params=hub.params), replace(hub, asynchrony=None))


def test_the_last_commit_of_islands_that_accumulate_freely_may_go_past_the_end() -> None:
    """Commits of 300 to 400 tokens: a run that was asked for 10,000 may have seen up to 400 more."""
    rounds = OverlapSummary(islands=(), background=1, exchanges=1, skipped=0, failed=0, most_tokens=400, fewest_tokens=300)
    free = replace(DILOCO, recipe="acco", tokens=10_390, overlap=rounds)
    assert "not comparable" not in tell(DDP, free)
    assert "not comparable" in tell(DDP, replace(free, tokens=10_600))
    assert "not comparable" in tell(DDP, replace(free, tokens=9_700)), "it never stops short of it"
    assert "not comparable" in tell(DDP, replace(free, overlap=None))
    even = replace(rounds, fewest_tokens=400)
    assert "not comparable" in tell(DDP, replace(free, overlap=even)), "with a fixed batch the last commit is as long as asked for"


def test_warm_start_tokens_count_as_work() -> None:
    assert "not comparable" in tell(DDP, replace(DILOCO, warm_start_tokens=5000))
    assert "not comparable" not in tell(DDP, replace(DILOCO, tokens=5000, warm_start_tokens=5000))


def test_a_round_more_or_less_is_still_the_same_work() -> None:
    assert "reaches" in tell(DDP, replace(DILOCO, tokens=10_050))


def test_models_of_different_size_are_not_compared() -> None:
    assert "ddp has 1.00 k and diloco has 2.00 k" in tell(DDP, replace(DILOCO, params=2000))


def test_losses_on_different_text_are_not_compared() -> None:
    rows = [
        Row(label="ddp", summary=DDP, data={"corpus": "stdlib", "tokenizer": "bytes"}),
        Row(label="diloco", summary=DILOCO, data={"corpus": "stdlib", "tokenizer": "bpe:512"}),
    ]
    assert verdict(rows) == (
        "These runs are not comparable, because their data differ: ddp has tokenizer=bytes and diloco has tokenizer=bpe:512."
    )
    assert "reaches" in verdict([rows[0], Row(label="diloco", summary=DILOCO, data=rows[0].data)])


def test_three_runs_are_told_in_one_sentence_against_the_one_that_sent_most() -> None:
    acco = replace(DDP, recipe="acco", val_loss=2.36, virtual_time_s=40.0)
    told = tell(DDP, DILOCO, acco)
    assert told == (
        "diloco reaches 2.31 against ddp's 2.35 with 1/20 of the bytes in 0.61 of the time; "
        "acco ends 0.01 worse than ddp (2.36 against 2.35), with the same bytes in 0.40 of the time."
    )


def test_many_runs_are_told_by_their_winners() -> None:
    others = [
        replace(DDP, recipe=f"run{n}", val_loss=2.4 + n / 10, sent_bytes_per_island=500.0 * n, virtual_time_s=70 - n)
        for n in (1, 2)
    ]
    broken = replace(DDP, recipe="broken", val_loss=math.nan, sent_bytes_per_island=1.0)
    assert tell(DDP, DILOCO, *others, broken) == (
        "Of 5 runs, diloco reaches the lowest loss (2.31), run1 sends least (500 B per island) "
        "and diloco is fastest (0:01:01); 1 diverged."
    )
    assert tell(*[replace(broken, recipe=str(n)) for n in range(5)]) == "All 5 runs diverged."


def test_one_run_alone_is_told_as_it_is() -> None:
    assert tell(DDP) == "ddp reaches 2.35 after 10.0 k tokens, sending 20.0 kB per island in 0:01:40."
    assert tell(replace(DDP, val_loss=math.nan)).startswith("ddp diverged (its loss is NaN)")


def test_every_verdict_is_one_sentence() -> None:
    for told in (
        tell(DDP),
        tell(DDP, DILOCO),
        tell(DDP, DILOCO, replace(DILOCO, recipe="x")),
        tell(DDP, replace(DILOCO, tokens=1)),
    ):
        assert told.endswith(".")
        assert ". " not in told
        assert "\n" not in told


def test_the_reference_among_equal_senders_is_the_slowest() -> None:
    fast = replace(DDP, recipe="fast", virtual_time_s=1.0)
    assert reference([Row(label=s.recipe, summary=s) for s in (fast, DDP)]).label == "ddp"


def test_losses_are_shown_with_one_number_of_digits() -> None:
    rows = [Row(label=str(loss), summary=replace(DDP, val_loss=loss)) for loss in (2.351, 2.349, 2.6)]
    assert list(losses_as_text(rows).values()) == ["2.351", "2.349", "2.600"]
