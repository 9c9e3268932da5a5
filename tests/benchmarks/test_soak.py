"""The soak with kills: its checks, tables and plot."""

import pytest


def soak_cell(**changes):
    """A cell of a soak of two minutes in which all checks hold, with these changes."""
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
        "planned": 1,
        "skipped": [],
        "recoveries": [{"victim": "island-0000", "at_s": 20.0, "commit_s": 2.0, "back_s": 9.0}],
        "loss": 2.5,
    }
    attended = [[0.0, 8, 8, 8, 1, "a"], [60.0, 8, 8, 7, 1, "b"], [300.0, 8, 8, 1, 9, "c"]]
    cell = {"attended": attended, "losses": [[0.0, 0, 5.0], [300.0, 99, 2.5]], "tokens": 99, "seconds": 300.0, "load": [1.0, 2.0]}
    return {**cell, "report": {**report, **changes}}


def checks(b, faulty, calm=None):
    return [holds for _, _, holds in b.soak.checks(faulty, calm or soak_cell(), b.soak_run.Soak(minutes=2.0))]


def test_all_checks_hold_and_commits_after_the_faults_do_not_count(b):
    assert checks(b, soak_cell()) == [True] * 6


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({"planned": 2}, 0),
        ({"apart": ["island-0001 held something else"]}, 1),
        ({"compared": 0}, 1),
        ({"compared": 14}, 1),  # of 16 participations, one of which a fault may have ended before the island logged its digest
        ({"data": ["shard 0: batches 0 to 10 are in no commit"]}, 4),
        ({"loss": 2.56}, 5),
    ],
)
def test_each_violation_fails_its_own_check(b, changes, number):
    assert [at for at, holds in enumerate(checks(b, soak_cell(**changes))) if not holds] == [number]


def test_shares_are_of_the_commits_during_the_faults(b):
    late = {**soak_cell(), "attended": [[0.0, 8, 8, 6, 2, "a"], [100.0, 8, 8, 6, 1, "b"]]}
    assert checks(b, late) == [True, True, False, False, True, True]


def test_a_soak_without_the_calm_run_has_no_claim_about_losses(b):
    soak = b.soak_run.Soak(minutes=2.0)
    assert len(b.soak.checks(soak_cell(), None, soak)) == 5
    outcome, figures = b.soak.sections_of(soak_cell(), None, soak)
    assert "final losses" not in outcome
    assert "left alone" not in figures


def test_losses_at_different_tokens_fail_their_check(b):
    assert checks(b, soak_cell(), {**soak_cell(), "tokens": 98})[5] is False


def test_the_seed_determines_the_kills_and_tables_and_plot_are_written(b, tmp_path):
    soak = b.soak_run.Soak()
    assert soak.script == b.soak_run.Soak().script != b.soak_run.Soak(seed=1).script
    assert len(soak.script.faults) == 29
    assert {type(one.fault).__name__ for one in b.soak_run.Soak(kinds=("Kill", "Freeze")).script.faults} == {"Kill", "Freeze"}
    outcome, figures = b.soak.sections_of(soak_cell(), soak_cell(), soak)
    assert "| every unit of data in exactly one commit | 24 units, each in one commit; 1 leased again | yes |" in outcome
    assert "(median, maximum) | 9.0, 9.0 | - |" in figures
    assert "| seconds from a commit to the next (mean) | 150.00 | 150.00 |" in figures
    assert b.soak.save_figure(
        b.soak.figure, {"with faults": soak_cell(), "left alone": soak_cell()}, tmp_path / "plot.png"
    ).exists()
