"""A soak in which islands are killed: what is right and what is wrong with its figures."""

import pytest


def stormy(**changes):
    """A cell of a soak of two minutes, in which everything is as it should be, but for what is changed."""
    report = {
        "commits": 3,
        "attempts": 3,
        "known": 8.0,
        "alive": 8.0,
        "participating": 7.5,
        "delivered": 24,
        "returned": 1,
        "data": [],
        "compared": 24,
        "apart": [],
        "unseen": 0,
        "done": {"Kill": 1},
        "recoveries": [{"victim": "island-0000", "at_s": 20.0, "commit_s": 2.0, "back_s": 9.0}],
        "loss": 2.5,
    }
    attended = [[0.0, 8, 8, 8, 1, "a"], [60.0, 8, 8, 6, 1, "b"], [300.0, 8, 8, 1, 9, "c"]]
    cell = {"attended": attended, "losses": [[0.0, 0, 5.0], [300.0, 99, 2.5]], "tokens": 99, "seconds": 300.0, "load": [1.0, 2.0]}
    return {**cell, "report": {**report, **changes}}


def holding(b, broken, alone=None):
    return [holds for _, _, holds in b.soak.checks(broken, alone or stormy(), b.soak_run.Soak(minutes=2.0))]


def test_a_soak_in_which_all_is_well_holds_and_what_comes_after_the_storm_does_not_count(b):
    assert holding(b, stormy()) == [True] * 5


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({"apart": ["island-0001 held something else"]}, 0),
        ({"compared": 0}, 0),
        ({"compared": 13}, 0),  # of 15 who took part, one of which may have been killed before it wrote it down
        ({"data": ["shard 0: batches 0 to 10 are in no commit"]}, 3),
        ({"loss": 2.56}, 4),
    ],
)
def test_what_a_soak_finds_wrong_is_told_from_what_is_right(b, changes, number):
    assert [at for at, holds in enumerate(holding(b, stormy(**changes))) if not holds] == [number]


def test_shares_of_a_soak_are_of_its_storm(b):
    late = {**stormy(), "attended": [[0.0, 8, 8, 6, 2, "a"], [100.0, 8, 8, 6, 1, "b"]]}
    assert holding(b, late) == [True, False, False, True, True]


def test_losses_after_other_numbers_of_tokens_are_not_compared(b):
    assert holding(b, stormy(), {**stormy(), "tokens": 98})[4] is False


def test_a_soaks_kills_are_its_seeds_and_its_tables_and_plot_are_drawn(b, tmp_path):
    soak = b.soak_run.Soak()
    assert soak.script == b.soak_run.Soak().script != b.soak_run.Soak(seed=1).script
    assert len(soak.script.faults) == 29
    assert {type(one.fault).__name__ for one in b.soak_run.Soak(kinds=("Kill", "Freeze")).script.faults} == {"Kill", "Freeze"}
    outcome, figures = b.soak.sections_of(stormy(), stormy(), soak)
    assert "| every unit of data in exactly one commit | 24 units, each in one commit; 1 leased again | yes |" in outcome
    assert "(median, most) | 9.0, 9.0 | - |" in figures
    assert b.soak.save_figure(b.soak.figure, {"with kills": stormy(), "left alone": stormy()}, tmp_path / "plot.png").exists()
