"""The asynchronous demo, in virtual time and on Ray: records in miniature, and what is judged."""

import json

import atoll.core.events as events_module

# --------------------------------------------------------------------------------------------------------------- async_demo


def test_the_asynchronous_demo_leaves_a_record_and_goes_on_from_it(b, small, lines_of, tmp_path, capsys):
    settings = [*small, "keep.evaluate_every=20", "algorithm.inner_steps=10"]
    arguments = ["--seeds", "0", "1", "--rates", "0.1", "0.7", "--record", str(tmp_path), "--quiet"]
    arguments += [part for each in settings for part in ("--set", each)]
    b.async_demo.main(arguments)
    cells, out = lines_of(tmp_path), capsys.readouterr().out
    assert len(cells) == 2 * (3 + 1)  # three recipes, and one rate besides the naive one's own
    assert "demo-async ends " in out
    assert "(the best rate)" in out
    assert (tmp_path / "plot.png").stat().st_size > 1000
    for cell in map(json.loads, cells):
        times, updates, losses = zip(*cell["curve"], strict=True)
        assert list(times) == sorted(times)
        assert (updates[0], updates[-1]) == (0, cell["summary"]["local_updates"])
        assert losses[-1] == cell["summary"]["val_loss"]
    b.async_demo.main(arguments)
    assert lines_of(tmp_path) == cells
    assert capsys.readouterr().out == out


def test_the_best_rate_is_that_of_the_lowest_mean_and_a_diverged_one_is_none(b):
    rows = b.async_demo.all_rows((), b.async_demo.RATES)
    assert list(rows) == ["demo-diloco", "demo-async", "demo-async-naive", *(f"demo-async-naive at {r}" for r in (0.03, 0.1, 0.3))]
    losses = dict(zip(rows, [(1.0, 1.0), (0.5, 0.5), (3.0, 3.0), (2.0, 1.0), (1.6, 1.6), ()], strict=True))
    outcomes = {
        label: b.cells.Outcome(rows[label], tuple({"val_loss": loss} for loss in losses[label]), () if losses[label] else ("NaN",))
        for label in rows
    }
    assert b.async_demo.best_naive(outcomes) == "demo-async-naive at 0.03"
    assert b.async_demo.naive_rates(outcomes)["demo-async-naive"] == 0.7


def test_the_time_that_is_asked_for_is_judged(b):
    def told(mine_s):
        rows = {"demo-diloco": 100.0, "demo-async": mine_s}
        return b.async_demo.time_line(
            {name: b.cells.Outcome(b.cells.Row(recipe=name), ({"virtual_time_s": time_s},)) for name, time_s in rows.items()}
        )

    assert [told(mine_s).split("**")[1] for mine_s in (40.0, 40.1)] == ["holds here", "does not hold here"]


# ---------------------------------------------------------------------------------------------------------------- async_ray


def test_nobody_waits_is_judged_by_every_seed_and_by_every_replay(b):
    def told(*times_s, same_bits=True):
        replay = {"rounds": 9, "largest": 0.0, "relative": 0.0 if same_bits else 1e-3, "tolerance": 1e-5, "same_bits": same_bits}
        more = {
            "staleness": 1.0,
            "steps": [9, 3],
            "hub_busy": 0.01,
            "hub_apply_s": 0.002,
            "replay": {**replay, "agrees": same_bits},
        }
        cells = []
        for seed, (sync_s, async_s) in enumerate(times_s):
            common = {"seed": seed, "local_updates": 12, "val_loss": 2.0, "utilisation": 0.5}
            cells.append({"label": "synchronous", "wall_s": sync_s, **common})
            cells.append({"label": "asynchronous", "wall_s": async_s, **common, **more})
        sections = b.async_ray.report(cells, 0.1, ("train.steps=6", "cluster.step_time_s=[0.5,1.25]"))
        return [line.split("**")[1] for line in sections[0].splitlines() if line.startswith("- **")], sections

    assert told((10.0, 4.5), (10.0, 4.0))[0] == ["holds here", "holds here"]
    assert told((10.0, 4.6), (10.0, 4.0))[0] == ["does not hold here", "holds here"]
    verdicts, sections = told((10.0, 4.0), same_bits=False)
    assert verdicts == ["holds here", "does not hold here"]
    assert "0.1 times its step time (0.50, 1.25, 0.50, 1.25 s)" in sections[1]
    assert "--engine dist" in sections[2]
    assert "--engine ray" in sections[2]


def test_how_busy_a_hub_was_is_weighed_by_how_long_each_report_tells_of(b):
    settings = {"virtual_time_s": None, "pushes": 1, "apply_s": 0.1, "waited_s": 0.0, "most_waiting": 1}
    reports = [events_module.HubLoad(seconds=9.0, busy=0.0, **settings), events_module.HubLoad(seconds=1.0, busy=0.5, **settings)]
    assert b.async_ray.busy(reports) == 0.05
