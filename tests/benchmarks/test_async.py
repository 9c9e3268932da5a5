"""The asynchronous demo, in virtual time and on Ray."""

import json

import atoll.core.events as events_module

# --------------------------------------------------------------------------------------------------------------- async_demo


def test_async_demo_writes_record_and_plot(b, small, lines_of, tmp_path, capsys):
    settings = [*small, "keep.evaluate_every=20", "algorithm.inner_steps=10"]
    arguments = ["--seeds", "0", "--processes", "1", "--rates", "0.1", "0.7", "--record", str(tmp_path), "--quiet"]
    arguments += [part for each in settings for part in ("--set", each)]
    b.async_demo.main(arguments)
    cells, out = lines_of(tmp_path), capsys.readouterr().out
    assert len(cells) == 3 + 1  # three recipes, and one more rate of the naive one
    assert "(the best rate)" in out
    assert (tmp_path / "plot.png").stat().st_size > 1000
    for cell in map(json.loads, cells):
        times, updates, losses = zip(*cell["curve"], strict=True)
        assert list(times) == sorted(times)
        assert (updates[0], updates[-1]) == (0, cell["summary"]["local_updates"])
        assert losses[-1] == cell["summary"]["val_loss"]


def test_the_best_rate_has_the_lowest_mean_and_did_not_diverge(b):
    rows = b.async_demo.all_rows((), b.async_demo.RATES)
    assert list(rows) == ["demo-diloco", "demo-async", "demo-async-naive", *(f"demo-async-naive at {r}" for r in (0.03, 0.1, 0.3))]
    losses = dict(zip(rows, [(1.0, 1.0), (0.5, 0.5), (3.0, 3.0), (2.0, 1.0), (1.6, 1.6), ()], strict=True))
    outcomes = {
        label: b.cells.Outcome(rows[label], tuple({"val_loss": loss} for loss in losses[label]), () if losses[label] else ("NaN",))
        for label in rows
    }
    assert b.async_demo.best_naive(outcomes) == "demo-async-naive at 0.03"
    assert b.async_demo.naive_rates(outcomes)["demo-async-naive"] == 0.7


def test_virtual_time_is_judged_by_its_bound(b):
    def verdict(time_s):
        times = {"sync": 100.0, "async": time_s}
        outcomes = {name: b.cells.Outcome(b.cells.Row(recipe=name), ({"virtual_time_s": s},)) for name, s in times.items()}
        return b.claims.time_line(outcomes, "async", "sync", 0.4).split("**")[1]

    assert [verdict(time_s) for time_s in (40.0, 40.1)] == ["holds here", "does not hold here"]


# ---------------------------------------------------------------------------------------------------------------- async_ray


def test_wall_time_is_judged_by_every_seed_and_every_replay(b):
    def verdicts(*times_s, same_bits=True):
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
        return [line.split("**")[1] for line in sections[0].splitlines() if line.startswith("- **")]

    assert verdicts((10.0, 4.5), (10.0, 4.0)) == ["holds here", "holds here"]
    assert verdicts((10.0, 4.6), (10.0, 4.0)) == ["does not hold here", "holds here"]
    assert verdicts((10.0, 4.0), same_bits=False) == ["holds here", "does not hold here"]


def test_hub_load_is_weighted_by_the_length_of_each_report(b):
    settings = {"virtual_time_s": None, "pushes": 1, "apply_s": 0.1, "waited_s": 0.0, "most_waiting": 1}
    reports = [events_module.HubLoad(seconds=9.0, busy=0.0, **settings), events_module.HubLoad(seconds=1.0, busy=0.5, **settings)]
    assert b.async_ray.busy(reports) == 0.05
