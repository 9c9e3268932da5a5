"""Slow links on one machine: two islands in network namespaces, joined by a shaped link.

    python benchmarks/slow_link.py                                   as root: about half an hour on two idle cores
    python benchmarks/slow_link.py --rates 100 --only "atoll ACCO"   some of it
    python benchmarks/slow_link.py --quick                           smoke test at small sizes

A cell is one method at one rate: a process in each namespace, with one torch thread. It measures first the link's throughput, with
plain sockets; then, in turn, inner steps alone, on both islands at the same time, and rounds, after a warm-up round. Bytes are the
interfaces' counts. The simulator predicts the round time from the measured step time and link of the same cell. One more cell is
the crossover: at its rate two exchanges take as long as the computation of a batch.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from atoll.algorithms.ddp import DDP
from atoll.core.errors import AtollError
from atoll.models.gpt import GPT
from atoll.runs.cluster import Link, all_reduce_cost
from atoll.telemetry.plot_style import save_figure
from atoll.testing.network_namespaces import NetworkNamespace, linked_pair, unavailable_reason
from progress import CellProgress
from record import Record, benchmark_parser, missing_text, open_record, script
from slow_atoll import ALGORITHMS
from slow_island import VOCAB, Spec, slower_median, unsteadiness
from slow_simulator import predicted
from slow_tables import BYTES, figure, sections_of
from slow_worker import BUCKETED, METHODS, OURS

WORKER = Path(__file__).resolve().parent / "slow_worker.py"
GRACE_S = 10.0
"""How long the other island may continue after one has failed."""


def run_islands(islands: Sequence[NetworkNamespace], specs: Sequence[Spec], limit_s: float) -> list[dict[str, Any]]:
    """The result of each island; or one error: of an island that failed by itself, if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{spec.rank}" for spec in specs]
        processes = [_started(island, spec, log) for island, spec, log in zip(islands, specs, logs, strict=True)]
        try:
            _wait(processes, limit_s)
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        results = [_result(process, log, limit_s) for process, log in zip(processes, logs, strict=True)]
    failed = [result for result in results if "error" in result]
    return sorted(failed, key=lambda result: bool(result.get("killed")))[:1] or results


def _started(island: NetworkNamespace, spec: Spec, log: Path) -> subprocess.Popen[str]:
    environment = {"GLOO_SOCKET_IFNAME": island.device, "OMP_NUM_THREADS": "1"}
    process = island.start([sys.executable, str(WORKER)], environment, log)
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(spec)) + "\n")
    process.stdin.flush()
    return process


def _wait(processes: Sequence[subprocess.Popen[str]], limit_s: float) -> None:
    """Waits until all have ended or the time limit is over. After a failure the limit is short."""
    deadline_s, failed = time.monotonic() + limit_s, False
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline_s:
        if not failed and any(process.poll() for process in processes):
            deadline_s, failed = min(deadline_s, time.monotonic() + GRACE_S), True
        time.sleep(0.05)


def _result(process: subprocess.Popen[str], log: Path, limit_s: float) -> dict[str, Any]:
    printed = [line for line in log.read_text().splitlines() if line.startswith("{")]
    if printed:
        result: dict[str, Any] = json.loads(printed[-1])
        return result
    if process.returncode == -9:
        return {"error": f"did not finish within {limit_s:g} s", "killed": True}
    last = log.with_suffix(".err").read_text().strip().splitlines()[-1:] or ["nothing"]
    return {"error": f"ended with code {process.returncode} and printed: {last[0][:300]}"}


RATES: tuple[float | None, ...] = (None, 1000.0, 100.0, 10.0)
"""Mbit/s; None: unshaped."""
CROSSOVER, RIVAL = "crossover", "torch DDP + ZeRO"
PROBE_S, FAST_MBIT = 2.0, 8000.0
"""Seconds of the throughput measurement, and the rate that it assumes for an unshaped link."""
CELL_LIMIT_S = 900.0
STEADY, TRIES = 0.15, 3
"""A cell whose steps alone vary more than STEADY was disturbed: it is measured again, up to TRIES times, and the steadiest
counts."""
BYTES_RATE = 100.0
"""The one rate at which the bytes of every codec are counted: they do not depend on it."""
NEAR = 0.05
"""Allowed relative difference between computation and two exchanges at the crossover."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of model, batches and measurements. Large batches keep the exchange's share of CPU time small."""

    layers: int = 4
    width: int = 208
    batch_size: int = 24  # sequences per inner step
    inner_steps: int = 100  # per round of DiLoCo and streaming
    local_batch: int = 2  # sequences per inner step of DiLoCo and streaming, whose rounds have many steps
    alone_steps: int = 2  # measured before each turn, and after the last; of small batches, ten times as many
    crossover_batch: int = 64  # sequences per update at the crossover; more of them mean a slower link there
    few: int | None = None  # maximum turns per cell

    @property
    def params(self) -> int:
        return GPT(layers=self.layers, width=self.width, heads=4, head_size=self.width // 4).num_params(VOCAB)

    def turns(self, method: str, rate: float | None) -> tuple[int, int]:
        """Turns of rounds and steps alone, and rounds per turn: more where rounds are short. DiLoCo has five rounds on slow
        links."""
        slow = rate is not None and rate <= 20
        turns, rounds = (5 if slow else 3, 1) if is_local(method) else (1, 4) if is_bytes(method) else (3, 1) if slow else (4, 2)
        return min(turns, self.few or turns), rounds

    def batch(self, method: str) -> int:
        """Sequences per inner step."""
        return self.local_batch if is_local(method) or is_bytes(method) else self.batch_size

    def tries(self, rate: float | None) -> int:
        """Fewer on a slow link, where computation hardly counts."""
        return 1 if self.few else 2 if rate is not None and rate <= 20 else TRIES

    def spec(self, islands: Sequence[NetworkNamespace], methods: Sequence[str], turns: tuple[int, int], rate: float | None) -> Spec:
        """The spec of the first island."""
        batch_size = self.batch(methods[0]) if methods else self.batch_size
        return Spec(
            rank=0,
            device=islands[0].device,
            addresses=[island.address for island in islands],
            methods=list(methods),
            turns=turns[0],
            rounds=turns[1],
            inner_steps=self.inner_steps,
            layers=self.layers,
            width=self.width,
            batch_size=batch_size,
            alone_steps=self.alone_steps * (10 if batch_size == self.local_batch and not self.few else 1),
            transfer_bytes=int((rate or FAST_MBIT) * 1e6 / 8 * PROBE_S) // (20 if self.few else 1),
        )


def is_local(method: str) -> bool:
    """Whether islands take many steps between two exchanges."""
    return "DiLoCo" in method or "streaming" in method


def is_bytes(method: str) -> bool:
    """Whether only the bytes of the method count."""
    return method.startswith(BYTES)


QUICK = Size(layers=1, width=32, batch_size=2, inner_steps=2, alone_steps=2, crossover_batch=4, few=2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__doc__, "slow_link", page="docs/slow_links.md", quick=True, dry=True)
    names = ["unshaped" if rate is None else f"{rate:g}" for rate in RATES]
    parser.add_argument("--rates", nargs="+", default=names, help="in Mbit/s, or `unshaped`")
    parser.add_argument("--only", nargs="+", default=[*METHODS, CROSSOVER], choices=[*METHODS, CROSSOVER], help="what to measure")
    options = parser.parse_args(arguments)
    reason = unavailable_reason()
    if reason is not None and not options.dry_run and not (options.record and options.record.exists()):
        print(f"skipped: {reason}.")
        return
    record = open_record(options, "slow_link")
    size = QUICK if options.quick else Size()
    rates = [None if text == "unshaped" else float(text) for text in options.rates]
    missing = [key for key in _keys(size, rates, options.only) if record.get(key) is None]
    if options.dry_run:
        print(missing_text(missing))
        return
    if missing and reason is not None:
        print(f"skipped: {reason}.")
        return
    measure(record, size, rates, options.only, quiet=options.quiet)
    shown = _keys(size, list(dict.fromkeys([*RATES, *rates])), [*METHODS, CROSSOVER])
    cells = [record[key] for key in shown if record.get(key) is not None]
    sections = sections_of(cells, size.params, size.inner_steps)
    save_figure(figure, [cell for cell in cells if "round_s" in cell], record.plot)
    record.publish("Slow links", sections, plot="seconds per inner step", docs=(options.docs, "slow_link"))


def measure(record: Record, size: Size, rates: Sequence[float | None], methods: Sequence[str], *, quiet: bool) -> None:
    """Measures the cells that the record does not have."""
    missing = {key: cell for key, cell in _keys(size, rates, methods).items() if record.get(key) is None}
    if not missing:
        return
    with linked_pair() as islands, CellProgress("slow links", len(missing), quiet=quiet) as progress:
        for key, (method, rate) in missing.items():
            progress.begin(key)
            cell = steadiest(lambda m=method, r=rate: _cell(islands, size, m, r), size.tries(rate))  # type: ignore[misc]
            record.add(key, {"method": method, "rate": rate, **cell})
            progress.end(f"{key}: " + (cell.get("error") or f"{cell.get('round_s', 0.0):.3f} s per round"))


def steadiest(make: Callable[[], dict[str, Any]], tries: int) -> dict[str, Any]:
    """The first steady cell; after this many tries the steadiest. A failed cell is not tried again."""
    made: list[dict[str, Any]] = []
    while len(made) < tries and not (made and ("error" in made[-1] or made[-1]["unsteady"] <= STEADY)):
        made.append(make())
    best = made[-1] if "error" in made[-1] else min(made, key=lambda cell: float(cell["unsteady"]))
    return {**best, "tries": len(made)}


def _cell(islands: Sequence[NetworkNamespace], size: Size, method: str, rate: float | None) -> dict[str, Any]:
    return crossover_cell(islands, size) if method == CROSSOVER else method_cell(islands, size, method, rate)


def _keys(size: Size, rates: Sequence[float | None], methods: Sequence[str]) -> dict[str, tuple[str, float | None]]:
    """Method and rate of each cell, by its key, which has all that the cell depends on."""
    keys: dict[str, tuple[str, float | None]] = {}
    for rate in rates:
        for method in (m for m in METHODS if m in methods and (rate == BYTES_RATE or not is_bytes(m))):
            place = "unshaped" if rate is None else f"{rate:g} Mbit/s"
            about = f"{size.params} parameters, batches of {size.batch(method)}, {size.turns(method, rate)[0]} turns"
            if is_local(method):
                about += f", rounds of {size.inner_steps} steps"
            keys[f"{method}, {place}: {about}"] = (method, rate)
    if CROSSOVER in methods:
        keys[f"{CROSSOVER}: {size.params} parameters, batches of {size.crossover_batch}"] = (CROSSOVER, None)
    return keys


# -------------------------------------------------------------------------------------------------------------- measuring


def method_cell(islands: Sequence[NetworkNamespace], size: Size, method: str, rate: float | None) -> dict[str, Any]:
    """One method at one rate."""
    found = both(islands, size.spec(islands, [method], size.turns(method, rate), rate), rate)
    if "error" in found[0]:
        return {"error": found[0]["error"]}
    turns = [each["rounds"][method] for each in found]
    line = {name: fmean(each["line"][name] for each in found) for name in found[0]["line"]}
    links = [Link(latency_s=line["latency_s"], bandwidth_mbit_per_s=line["mbit_per_s"])] * len(islands)
    formula = all_reduce_cost(size.params, 4, links).sent_bytes
    cell = {
        "unsteady": unsteadiness([each["alone_s"] for each in found]),
        "step_s": slower_median([each["alone_s"] for each in found]),
        "round_s": slower_median([[time_s for turn in mine for time_s in turn["round_s"]] for mine in turns]),
        "steps": turns[0][0]["steps"],
        "payload_bytes": [fmean(turn["payload_bytes"] for turn in mine) for mine in turns],
        "formula_bytes": [turns[0][0]["exchanges"] * num_bytes for num_bytes in formula],
        "line": line,
        "all": found,
    }
    if method in (*OURS, BUCKETED):
        buckets = math.ceil(4 * size.params / 2**20)
        algorithm = DDP(buckets=buckets) if method == BUCKETED else ALGORITHMS[OURS[method]](size.inner_steps)
        measured = {"step_s": cell["step_s"], "mbit_per_s": line["mbit_per_s"], "latency_s": line["latency_s"]}
        prediction = predicted(algorithm, params=size.params, **measured)
        cell |= {"predicted_s": prediction.round_s, "busiest_second_bytes": prediction.busiest_second_bytes}
        if method in OURS:
            cell["formula_bytes"] = [prediction.sent_bytes] * len(islands)
    return cell


def crossover_cell(islands: Sequence[NetworkNamespace], size: Size) -> dict[str, Any]:
    """ACCO and its rival at the rate where two exchanges take as long as computation: finds the rate, then measures in turn."""
    base = replace(size.spec(islands, [], (1, 1), None), batch_size=size.crossover_batch, transfer_bytes=0, exchanges=3)
    rate = 2 * size.params * 32 / 1e6  # the formula's rate, if computation took a second
    for _ in range(4):
        step_s, exchange_s = _alone(islands, base, rate)
        if abs(2 * exchange_s / step_s - 1) <= NEAR:
            break
        rate *= 2 * exchange_s / step_s
    methods = ["atoll ACCO", RIVAL]
    spec = replace(base, methods=methods, rounds=2, turns=1 if size.few else 8, exchanges=2)
    found = both(islands, spec, rate)
    if "error" in found[0]:
        return {"error": found[0]["error"]}
    rounds = {name: [[s for turn in each["rounds"][name] for s in turn["round_s"]] for each in found] for name in methods}
    return {
        "mbit_per_s": rate,
        "batch_size": size.crossover_batch,
        "unsteady": unsteadiness([each["alone_s"] for each in found]),
        "step_s": slower_median([each["alone_s"] for each in found]),
        "exchange_s": slower_median([each["exchange_s"] for each in found]),
        "update_s": {name: slower_median(times_s) for name, times_s in rounds.items()},
        "all": found,
    }


def _alone(islands: Sequence[NetworkNamespace], spec: Spec, rate: float) -> tuple[float, float]:
    """Seconds of a step alone, and of an exchange alone."""
    found = both(islands, spec, rate)
    if "error" in found[0]:
        raise AtollError(f"the exchange of two islands at {rate:g} Mbit/s failed: {found[0]['error']}.")
    return slower_median([each["alone_s"] for each in found]), slower_median([each["exchange_s"] for each in found])


def both(islands: Sequence[NetworkNamespace], spec: Spec, rate: float | None) -> list[dict[str, Any]]:
    """The results of both islands at this rate."""
    for island in islands:
        island.shape(rate)
    specs = [replace(spec, rank=rank, device=island.device) for rank, island in enumerate(islands)]
    return run_islands(islands, specs, CELL_LIMIT_S)


if __name__ == "__main__":
    script(main)
