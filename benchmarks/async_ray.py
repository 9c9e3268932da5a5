"""Asynchronous training on Ray against DiLoCo on torch.distributed: real processes, at the same pace.

    python benchmarks/async_ray.py                 four workers, seeds 0, 1 and 2
    python benchmarks/async_ray.py --seeds 0       one seed

Both have the same number of local updates of the demo's workload, on four processes that emulate machines of very different speeds:
each sleeps `--pace` times its step time for every batch, besides computing it. Wall time is from the first round to the one that
completes the updates. The script then replays each asynchronous run from its log and compares the weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import AtollError
from atoll.core.events import HubLoad, RoundFinished
from atoll.runs.run_settings import candidates
from atoll.telemetry.event_log import read_events
from progress import CellProgress
from record import benchmark_parser, bullets, holds_text, markdown_table, open_record, script

MOST_TIME = 0.45
"""Allowed share of the synchronous run's wall time."""
WORKERS = 4
ROWS = {"synchronous": ("demo-diloco", "processes"), "asynchronous": ("demo-async", "ray")}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__doc__, "async_ray")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one pair of runs for each")
    parser.add_argument("--pace", type=float, default=0.2, help="seconds of sleep per second of step time")
    parser.add_argument("--steps", type=int, default=100, help="inner steps per worker")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting of every run")
    options = parser.parse_args(arguments)
    settings = (f"train.steps={options.steps}", f"keep.evaluate_every={options.steps}", *SETTINGS, *options.set)
    record = open_record(options, "async_ray")
    keys = [(label, seed) for seed in options.seeds for label in ROWS]
    with CellProgress("async on Ray", len(keys), quiet=options.quiet) as progress:
        for label, seed in keys:
            key = f"{label} {json.dumps([seed, options.pace, settings])}"
            progress.begin(f"{label}, seed {seed}")
            if record.get(key) is None:
                record.add(key, {"label": label, "seed": seed, **measured(label, seed, options.pace, settings)})
            progress.end(f"{label}, seed {seed}: {record[key]['wall_s']:.1f} s")
    cells = [record[f"{label} {json.dumps([seed, options.pace, settings])}"] for label, seed in keys]
    record.publish("Asynchronous training on real processes", report(cells, options.pace, settings))


SETTINGS = ("train.warm_start_steps=40", "train.batch_size=8", "data.limit_bytes=2000000")
"""Batches that compute faster than they sleep: two cores compute for four workers."""


def command(label: str, seed: int, pace: float, settings: Sequence[str]) -> list[str]:
    """The arguments of `atoll` for a cell, but for its folder."""
    recipe, engine = ROWS[label]
    sets = [part for setting in settings for part in ("--set", setting)]
    return [
        "run",
        recipe,
        "--seed",
        str(seed),
        *sets,
        "--engine",
        engine,
        "--processes",
        str(WORKERS),
        "--set",
        f"engine.step_delay={pace:g}",
    ]


def measured(label: str, seed: int, pace: float, settings: Sequence[str]) -> dict[str, Any]:
    """Runs a cell in a process of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        summary = json.loads(_atoll(*command(label, seed, pace, settings), "--out", str(folder), "--json", "--quiet"))
        rounds = list(read_events(folder / "events.jsonl", [RoundFinished]))
        cell = {
            "wall_s": rounds[-1].time_s,  # type: ignore[attr-defined]
            "local_updates": summary["local_updates"],
            "val_loss": summary["val_loss"],
            "utilisation": summary["utilisation"],
        }
        if label == "synchronous":
            return cell
        loads = [event for event in read_events(folder / "events.jsonl", [HubLoad]) if isinstance(event, HubLoad)]
        again = json.loads(_atoll("replay", str(folder), "--json", "--quiet"))
        return cell | {
            "staleness": summary["asynchrony"]["staleness"]["mean"],
            "steps": [worker["steps"] for worker in summary["asynchrony"]["workers"]],
            "hub_busy": busy(loads),
            "hub_apply_s": sum(load.apply_s * load.pushes for load in loads) / max(1, sum(load.pushes for load in loads)),
            "replay": {name: again[name] for name in ("rounds", "largest", "relative", "tolerance", "same_bits", "agrees")},
        }


def busy(loads: Sequence[HubLoad]) -> float:
    """The share of the time in which the hub was busy. Reports cover intervals of different lengths."""
    return sum(load.busy * load.seconds for load in loads) / sum(load.seconds for load in loads)


def step_times_s(settings: Sequence[str]) -> list[float]:
    """Seconds per batch of each emulated machine."""
    run = override(recipes.demo_async(), list(settings), candidates)
    return [run.effective_cluster.step_time(number, run.seed) for number in range(WORKERS)]


def _atoll(*arguments: str) -> str:
    """Runs a command of atoll and returns the last line that it prints."""
    done = subprocess.run([sys.executable, "-m", "atoll", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise AtollError(f"atoll {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout.splitlines()[-1]


# ------------------------------------------------------------------------------------------------------------- the report


def ratios(cells: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Asynchronous over synchronous wall time, by seed.

    >>> sync = {"label": "synchronous", "seed": 0, "wall_s": 10.0, "local_updates": 100}
    >>> ratios([sync, {"label": "asynchronous", "seed": 0, "wall_s": 4.1, "local_updates": 102}])
    {0: 0.41}
    """
    wall_s = {(cell["label"], cell["seed"]): cell["wall_s"] for cell in cells}
    return {seed: wall_s["asynchronous", seed] / wall_s["synchronous", seed] for label, seed in wall_s if label == "synchronous"}


def report(cells: Sequence[Mapping[str, Any]], pace: float, settings: Sequence[str]) -> list[str]:
    """The sections of the record."""
    found = ratios(cells)
    replays = [cell["replay"] for cell in cells if "replay" in cell]
    same = sum(replay["same_bits"] for replay in replays)
    shown = ", ".join(f"{ratio:.3f}" for ratio in found.values())
    outcome = [
        f"{holds_text(max(found.values()) <= MOST_TIME)}: the asynchronous run takes at most {MOST_TIME} of the synchronous one's "
        f"wall time for the same number of local updates. By seed: {shown}; mean {fmean(found.values()):.3f}.",
        f"{holds_text(all(replay['agrees'] for replay in replays))}: a replay from the log gives the same weights within "
        f"{replays[0]['tolerance']:g} of the largest weight. Largest difference "
        f"{max(replay['relative'] for replay in replays):.2g}; {same} of {len(replays)} have the same bits.",
        f"The hub applies updates for {100 * fmean(cell['hub_busy'] for cell in cells if 'hub_busy' in cell):.1f} % of the time, "
        f"{1000 * fmean(cell['hub_apply_s'] for cell in cells if 'hub_apply_s' in cell):.2f} ms per update.",
    ]
    times = ", ".join(f"{time_s:.2f}" for time_s in step_times_s(settings))
    paces = f"{WORKERS} processes on one machine. Each sleeps for {pace:g} times its step time ({times} s) per batch."
    lines = dict.fromkeys("atoll " + " ".join(command(cell["label"], 0, pace, settings)) for cell in cells)
    return [
        f"## Outcome\n\n{bullets(outcome)}",
        f"## Runs\n\n{paces} The computation on shared cores comes on top.\n\n{_table(cells)}",
        "## Commands\n\nFor seed 0:\n\n```\n" + "\n".join(lines) + "\n```",
    ]


def _table(cells: Sequence[Mapping[str, Any]]) -> str:
    headings = [
        "run",
        "seed",
        "wall time",
        "local updates",
        "val loss",
        "utilisation",
        "staleness",
        "steps of each worker",
        "replay",
    ]
    rows = []
    for cell in cells:
        replay = cell.get("replay")
        more = ["-", "-", "-"]
        if replay is not None:
            found = "same bits" if replay["same_bits"] else f"{replay['relative']:.2g}"
            more = [f"{cell['staleness']:.2f}", ", ".join(map(str, cell["steps"])), f"{replay['rounds']} rounds, {found}"]
        figures = [f"{cell['wall_s']:.1f} s", str(cell["local_updates"]), f"{cell['val_loss']:.3f}", f"{cell['utilisation']:.0%}"]
        rows.append([cell["label"], str(cell["seed"]), *figures, *more])
    return markdown_table(headings, rows)


if __name__ == "__main__":
    script(main)
