"""Slow links on one machine: two islands in network namespaces, joined by a shaped link.

    python benchmarks/slow_link.py                                   as root: twenty minutes on two idle cores
    python benchmarks/slow_link.py --rates 100 --only "atoll ACCO"   some of it
    python benchmarks/slow_link.py --quick                           in miniature, to see whether it works here

A cell is one way to train at one rate: a process in each namespace, with one torch thread. It measures, in this order: what the
line carries, by plain sockets; then, in turn, inner steps alone, in both islands at a time, and rounds, after one that only warms
up. Bytes are the interfaces' own counts. The simulator is told the step time and the line of the same cell, and predicts.
The crossover is one more cell: the line is shaped so that two exchanges take as long as computing a batch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from atoll.core.errors import AtollError
from atoll.models.gpt import GPT
from atoll.runs.cluster import Link, all_reduce_cost
from atoll.telemetry.plot_style import save_figure
from atoll.testing.namespaces import NetworkNamespace, linked_pair, unavailable_reason
from progress import Watch
from record import Record, default_path, fill, script
from slow_island import VOCAB, Spec, middle, unsteadiness
from slow_simulator import predicted_s
from slow_tables import figure, sections_of
from slow_worker import METHODS, OURS

WORKER = Path(__file__).resolve().parent / "slow_worker.py"
GRACE_S = 10.0
"""How long the other island may go on after one has failed."""


def carried_out(islands: Sequence[NetworkNamespace], specs: Sequence[Spec], limit_s: float) -> list[dict[str, Any]]:
    """What each island found; or one error alone, of the island that failed by itself if there is one."""
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
    """Until all have ended, or it has been too long; it is too long soon after one has failed."""
    deadline_s, failed = time.monotonic() + limit_s, False
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline_s:
        if not failed and any(process.poll() for process in processes):
            deadline_s, failed = min(deadline_s, time.monotonic() + GRACE_S), True
        time.sleep(0.05)


def _result(process: subprocess.Popen[str], log: Path, limit_s: float) -> dict[str, Any]:
    told = [line for line in log.read_text().splitlines() if line.startswith("{")]
    if told:
        result: dict[str, Any] = json.loads(told[-1])
        return result
    if process.returncode == -9:
        return {"error": f"did not finish within {limit_s:g} s", "killed": True}
    said = log.with_suffix(".err").read_text().strip().splitlines()[-1:] or ["nothing"]
    return {"error": f"ended with code {process.returncode} and said: {said[0][:300]}"}


RATES: tuple[float | None, ...] = (None, 1000.0, 100.0, 10.0)
"""Mbit/s; none is not shaped."""
CROSSOVER, RIVAL = "crossover", "torch DDP + ZeRO"
PROBE_S, FAST_MBIT = 2.0, 8000.0
"""How long the line is looked at, and as what it counts there when it is not shaped."""
CELL_LIMIT_S = 900.0
STEADY, TRIES = 0.15, 3
"""A cell whose steps alone are less steady than this was disturbed: it is measured again, so often at most, and the steadiest
counts."""
NEAR = 0.05
"""How near to each other computing and two exchanges must be at the crossover, as a share."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large it all is.

    Attributes:
        layers, width: of the model.
        batch_size: sequences of an inner step: enough that an exchange takes little of the cores' time, which it shares here.
        inner_steps: of a round of DiLoCo.
        alone_steps: measured before each turn, and after the last.
        crossover_batch: sequences of an update at the crossover. The more they are, the slower the line is there, and the less of
            the cores' time an exchange takes.
        few: at most so many turns of each cell.
    """

    layers: int = 4
    width: int = 208
    batch_size: int = 24
    inner_steps: int = 10
    alone_steps: int = 2
    crossover_batch: int = 64
    few: int | None = None

    @property
    def params(self) -> int:
        return GPT(layers=self.layers, width=self.width, heads=4, head_size=self.width // 4).num_params(VOCAB)

    def turns(self, method: str, rate: float | None) -> tuple[int, int]:
        """How often rounds and steps alone take turns, and rounds of a turn: more where they are short. DiLoCo does five rounds
        where they are longest."""
        slow = rate is not None and rate <= 20
        turns, rounds = (5 if slow else 3, 1) if "DiLoCo" in method else (3, 1) if slow else (4, 2)
        return min(turns, self.few or turns), rounds

    def tries(self, rate: float | None) -> int:
        """On a slow line, computing hardly counts."""
        return 1 if self.few else 2 if rate is not None and rate <= 20 else TRIES

    def spec(self, islands: Sequence[NetworkNamespace], methods: Sequence[str], turns: tuple[int, int], rate: float | None) -> Spec:
        """For the first island."""
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
            batch_size=self.batch_size,
            alone_steps=self.alone_steps,
            transfer_bytes=int((rate or FAST_MBIT) * 1e6 / 8 * PROBE_S) // (20 if self.few else 1),
        )


QUICK = Size(layers=1, width=32, batch_size=2, inner_steps=2, alone_steps=2, crossover_batch=4, few=2)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    reason = unavailable_reason()
    if reason is not None:
        print(f"skipped: {reason}.")
        return
    record = Record(options.record or default_path("slow_link" + ("_quick" if options.quick else "")))
    size = QUICK if options.quick else Size()
    rates = [None if text == "unshaped" else float(text) for text in options.rates]
    measure(record, size, rates, options.only, quiet=options.quiet)
    shown = _keys(size, list(dict.fromkeys([*RATES, *rates])), [*METHODS, CROSSOVER])
    cells = [record[key] for key in shown if record.get(key) is not None]
    sections = sections_of(cells, size.params, size.inner_steps)
    save_figure(figure, [cell for cell in cells if "round_s" in cell], record.plot)
    readme = record.write("Slow links", [*sections, f"![seconds of an inner step]({record.plot.name})"])
    fill(options.docs, "slow_link", sections, record)
    print("\n\n".join(sections))
    print(f"\nrecord: {readme}")


def measure(record: Record, size: Size, rates: Sequence[float | None], methods: Sequence[str], *, quiet: bool) -> None:
    """All cells that the record does not have."""
    wanted = _keys(size, rates, methods)
    todo = {key: what for key, what in wanted.items() if record.get(key) is None}
    with linked_pair() as islands, Watch("slow links", len(todo), quiet=quiet) as watch:
        for key, (method, rate) in todo.items():
            watch.begin(key)
            cell = calmest(lambda m=method, r=rate: _measured(islands, size, m, r), size.tries(rate))  # type: ignore[misc]
            record.add(key, {"method": method, "rate": rate, **cell})
            watch.end(f"{key}: " + (cell.get("error") or f"{cell.get('round_s', 0.0):.3f} s a round"))


def calmest(make: Callable[[], dict[str, Any]], tries: int) -> dict[str, Any]:
    """A cell that nothing disturbed, if there is one in so many; else the one that was disturbed least. One that fails is that."""
    made: list[dict[str, Any]] = []
    while len(made) < tries and not (made and ("error" in made[-1] or made[-1]["unsteady"] <= STEADY)):
        made.append(make())
    best = made[-1] if "error" in made[-1] else min(made, key=lambda cell: float(cell["unsteady"]))
    return {**best, "tries": len(made)}


def _measured(islands: Sequence[NetworkNamespace], size: Size, method: str, rate: float | None) -> dict[str, Any]:
    return crossed(islands, size) if method == CROSSOVER else trained(islands, size, method, rate)


def _keys(size: Size, rates: Sequence[float | None], methods: Sequence[str]) -> dict[str, tuple[str, float | None]]:
    """What each cell is of, by its key, which has in it all that it depends on."""
    keys: dict[str, tuple[str, float | None]] = {}
    for rate in rates:
        for method in (method for method in METHODS if method in methods):
            place = "unshaped" if rate is None else f"{rate:g} Mbit/s"
            about = f"{size.params} parameters, batches of {size.batch_size}, {size.turns(method, rate)[0]} turns"
            keys[f"{method}, {place}: {about}"] = (method, rate)
    if CROSSOVER in methods:
        keys[f"{CROSSOVER}: {size.params} parameters, batches of {size.crossover_batch}"] = (CROSSOVER, None)
    return keys


# -------------------------------------------------------------------------------------------------------------- measuring


def trained(islands: Sequence[NetworkNamespace], size: Size, method: str, rate: float | None) -> dict[str, Any]:
    """One way to train at one rate."""
    found = _both(islands, size.spec(islands, [method], size.turns(method, rate), rate), rate)
    if "error" in found[0]:
        return {"error": found[0]["error"]}
    turns = [each["rounds"][method] for each in found]
    line = {name: fmean(each["line"][name] for each in found) for name in found[0]["line"]}
    links = [Link(latency_s=line["latency_s"], bandwidth_mbit_per_s=line["mbit_per_s"])] * len(islands)
    formula = all_reduce_cost(size.params, 4, links).sent_bytes
    cell = {
        "unsteady": unsteadiness([each["alone_s"] for each in found]),
        "step_s": middle([each["alone_s"] for each in found]),
        "round_s": middle([[time_s for turn in mine for time_s in turn["round_s"]] for mine in turns]),
        "steps": turns[0][0]["steps"],
        "payload_bytes": [fmean(turn["payload_bytes"] for turn in mine) for mine in turns],
        "formula_bytes": [turns[0][0]["exchanges"] * num_bytes for num_bytes in formula],
        "line": line,
        "all": found,
    }
    if method in OURS:
        measured = {"step_s": cell["step_s"], "mbit_per_s": line["mbit_per_s"], "latency_s": line["latency_s"]}
        cell["predicted_s"] = predicted_s(OURS[method], params=size.params, inner_steps=size.inner_steps, **measured)
    return cell


def crossed(islands: Sequence[NetworkNamespace], size: Size) -> dict[str, Any]:
    """ACCO and its rival where two exchanges take as long as computing: the line is looked for, then all is measured in turn."""
    base = replace(size.spec(islands, [], (1, 1), None), batch_size=size.crossover_batch, transfer_bytes=0, exchanges=3)
    rate = 2 * size.params * 32 / 1e6  # by the formula, if computing took a second
    for _ in range(4):
        step_s, exchange_s = _alone(islands, base, rate)
        if abs(2 * exchange_s / step_s - 1) <= NEAR:
            break
        rate *= 2 * exchange_s / step_s
    methods = ["atoll ACCO", RIVAL]
    spec = replace(base, methods=methods, rounds=2, turns=1 if size.few else 8, exchanges=2)
    found = _both(islands, spec, rate)
    if "error" in found[0]:
        return {"error": found[0]["error"]}
    rounds = {name: [[s for turn in each["rounds"][name] for s in turn["round_s"]] for each in found] for name in methods}
    return {
        "mbit_per_s": rate,
        "batch_size": size.crossover_batch,
        "unsteady": unsteadiness([each["alone_s"] for each in found]),
        "step_s": middle([each["alone_s"] for each in found]),
        "exchange_s": middle([each["exchange_s"] for each in found]),
        "update_s": {name: middle(times_s) for name, times_s in rounds.items()},
        "all": found,
    }


def _alone(islands: Sequence[NetworkNamespace], spec: Spec, rate: float) -> tuple[float, float]:
    """Seconds of a step, and of an exchange."""
    found = _both(islands, spec, rate)
    if "error" in found[0]:
        raise AtollError(f"islands that exchange at {rate:g} Mbit/s failed: {found[0]['error']}.")
    return middle([each["alone_s"] for each in found]), middle([each["exchange_s"] for each in found])


def _both(islands: Sequence[NetworkNamespace], spec: Spec, rate: float | None) -> list[dict[str, Any]]:
    """What both islands find at this rate."""
    for island in islands:
        island.shape(rate)
    specs = [replace(spec, rank=rank, device=island.device) for rank, island in enumerate(islands)]
    return carried_out(islands, specs, CELL_LIMIT_S)


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    rates = ["unshaped" if rate is None else f"{rate:g}" for rate in RATES]
    parser.add_argument("--rates", nargs="+", default=rates, help="in Mbit/s, or `unshaped`")
    parser.add_argument("--only", nargs="+", default=[*METHODS, CROSSOVER], choices=[*METHODS, CROSSOVER], help="what to measure")
    parser.add_argument("--quick", action="store_true", help="in miniature, to see whether it works")
    parser.add_argument("--record", type=Path, help="the record's folder; None: records/<today>_slow_link")
    parser.add_argument("--docs", type=Path, help="a page whose marks are filled with the tables, such as docs/slow_links.md")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


if __name__ == "__main__":
    script(main)
