"""Two real processes on one GPU: do ACCO's exchanges overlap with computing, and does DiLoCo train compiled in bfloat16?

    python benchmarks/cuda_processes.py        a few minutes, on a machine with CUDA

Both processes share the GPU. gloo exchanges through pinned memory and the loopback device. Runs of ZeRO-1, which has no overlap,
give the times of computation (c) and of an exchange (m). ACCO on the same batches should take about max(c, 2m) per update, and c +
2m without overlap.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

from atoll.core.errors import ConfigError
from atoll.core.events import Computed, Evaluated, Event, Exchanged, RoundFinished
from atoll.telemetry.event_log import read_events
from atoll.telemetry.sync_summary import read_overlap
from progress import CellProgress
from record import Record, benchmark_parser, markdown_table, open_record, script

COMMON = {
    "train.device": "cuda",
    "train.warm_start_steps": "0",
    "data.seq_len": "256",
    "keep.evaluate_every": "100000",
    "keep.save_every": "100000",
}
SETTLED = 5
"""Rounds before this one do not count: CUDA selects kernels and allocates memory."""


def _run(recipe: str, settings: Mapping[str, str]) -> tuple[list[Event], float | None]:
    """The events of a run on two processes, and the hidden share of its exchanges."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        more = [argument for path, value in {**COMMON, **settings}.items() for argument in ("--set", f"{path}={value}")]
        command = [sys.executable, "-m", "atoll", "run", recipe, "--engine", "processes", "--processes", "2", "--quiet"]
        done = subprocess.run([*command, "--out", str(out), *more], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"{recipe} failed: {done.stderr[-2000:]}")
        overlap = read_overlap(out)
        return list(read_events(out / "events.jsonl")), overlap.hidden if overlap else None


def _gradients(record: Record, batch_size: int, steps: int) -> None:
    """One batch size with ZeRO-1 and with ACCO."""
    for recipe in ("demo-zero1", "demo-acco"):
        key = f"{recipe} batch {batch_size}"
        if record.get(key) is not None:
            continue
        settings = {"model": "m60", "train.batch_size": str(batch_size), "train.steps": str(steps), "train.precision": "all-bf16"}
        events, hidden = _run(recipe, settings)
        rounds = [event for event in events if isinstance(event, RoundFinished)]
        times = [event.time_s for event in rounds]
        update_s = median(later - sooner for sooner, later in zip(times[SETTLED:], times[SETTLED + 1 :], strict=False))
        computed = _computed_s(events)
        figures = {"update_s": update_s, "computed_s": median(computed), "exchange_s": _exchange_s(events), "hidden": hidden}
        record.add(key, figures)


def _computed_s(events: Sequence[Event]) -> list[float]:
    """Seconds of computation of the first island in each round that counts."""
    rounds: dict[int, float] = {}
    for event in events:
        if isinstance(event, Computed) and event.island == 0 and event.round >= SETTLED:
            rounds[event.round] = rounds.get(event.round, 0.0) + event.end_s - event.start_s
    return list(rounds.values())


def _exchange_s(events: Sequence[Event]) -> float:
    """Median seconds from the start of a round's first exchange to the end of its last, with the step between them."""
    rounds: dict[int, list[Exchanged]] = {}
    for event in events:
        if isinstance(event, Exchanged) and event.round >= SETTLED:
            rounds.setdefault(event.round, []).append(event)
    return median(max(e.end_s for e in exchanges) - min(e.start_s for e in exchanges) for exchanges in rounds.values())


def _diloco(record: Record, steps: int) -> None:
    if record.get("diloco") is None:
        more = {"model": "m60", "train.compile": "true", "train.precision": "bf16", "train.steps": str(steps)}
        more |= {"optimizer.lr": "Cosine(lr=0.001,warmup=20)", "train.batch_size": "16"}
        events, _ = _run("demo-diloco", more)
        losses = [event.loss for event in events if isinstance(event, Evaluated)]
        last = [event for event in events if isinstance(event, RoundFinished)][-1]
        record.add("diloco", {"losses": losses, "rounds": last.round, "tokens": last.tokens, "wall_time_s": last.time_s})


def _tables(record: Record, batch_sizes: Sequence[int]) -> list[str]:
    rows = []
    for size in batch_sizes:
        zero1, acco = record[f"demo-zero1 batch {size}"], record[f"demo-acco batch {size}"]
        c_s, m_s = zero1["computed_s"], zero1["exchange_s"]
        rows.append(
            [
                str(size),
                f"{1e3 * c_s:.0f}",
                f"{1e3 * m_s:.0f}",
                f"{1e3 * zero1['update_s']:.0f}",
                f"{1e3 * acco['update_s']:.0f}",
                f"{acco['update_s'] / max(c_s, 2 * m_s):.2f}",
                f"{acco['update_s'] / (c_s + 2 * m_s):.2f}",
                f"{acco['hidden']:.0%}",
            ]
        )
    head = ["batch", "c, ms", "m, ms", "ZeRO-1, ms", "ACCO, ms", "ACCO / max(c, 2m)", "ACCO / (c + 2m)", "exchanges hidden"]
    diloco = record["diloco"]
    return [
        "Two processes on one GPU, gloo, the 60 M preset all in bfloat16, sequences of 256: medians per update.",
        markdown_table(head, rows),
        f"DiLoCo, compiled, forward passes in bfloat16: validation loss {' to '.join(f'{loss:.3f}' for loss in diloco['losses'])} "
        f"in {diloco['rounds']} rounds, {diloco['tokens']} tokens and {diloco['wall_time_s']:.0f} s.",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__doc__, "cuda_processes")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 128, 256, 512], help="sequences per island")
    parser.add_argument("--steps", type=int, default=40, help="updates per run")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise ConfigError("this script measures two processes on a GPU, and torch sees none here. Run it on a machine with CUDA.")
    record = open_record(options, "cuda_processes")
    with CellProgress("cuda_processes", len(options.batch_sizes) + 1, quiet=options.quiet) as progress:
        for size in options.batch_sizes:
            progress.begin(f"batch {size}")
            _gradients(record, size, options.steps)
            progress.end(f"batch {size}: {1e3 * record[f'demo-acco batch {size}']['update_s']:.0f} ms per update of ACCO")
        progress.begin("DiLoCo")
        _diloco(record, 4 * options.steps // 20 * 20)
        progress.end(f"DiLoCo: loss {record['diloco']['losses'][-1]:.3f}")
    record.publish("Two processes on one GPU", _tables(record, options.batch_sizes))


if __name__ == "__main__":
    script(main)
