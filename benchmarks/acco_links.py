"""When overlap pays: time per update against the bandwidth of the link, and the length of an exchange against islands.

    python benchmarks/acco_links.py        half a minute

The clock is virtual and the model has 960 parameters: the script measures when islands wait, which does not depend on the training.
With c the slowest island's computation per update and m one exchange (a reduce-scatter and an all-gather), an update should take c
+ m with DDP and ZeRO-1, max(c, m) with DPU and WP, and max(c, 2m) with ACCO, which exchanges twice. The script chooses the
bandwidth for a given m; a larger model on a faster link has the same m.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import ZeRO1
from atoll.core.events import Exchanged, RoundFinished
from atoll.core.protocols import Algorithm
from atoll.optim.adam import AdamW
from atoll.runs.cluster import Cluster, Link
from atoll.telemetry.plot_style import COLOURS, new_figure, save_figure
from atoll.telemetry.units import human_bytes, human_percent
from atoll.testing.simulated_runs import Regression, simulate
from progress import CellProgress
from record import Record, benchmark_parser, bullets, holds_text, markdown_table, missing_text, open_record, script

WORKLOAD = Regression(hidden=137)
PARAMS, PARAM_BYTES = 960, 4
"""Of the model. All numbers of islands below divide it."""
STEP_TIMES_S = (0.5, 0.8, 0.9, 1.0)
C_S = max(STEP_TIMES_S)
RATIOS = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
"""2m/c."""
UPDATES, SETTLED = 16, 4
"""Simulated updates, and the first in steady state: before it ACCO computes a half-batch without an exchange."""

ALGORITHMS: Mapping[str, Callable[[], Algorithm[Any]]] = {
    "DDP": lambda: DDP(optimizer=AdamW(lr=1e-3)),
    "ZeRO-1": lambda: ZeRO1(optimizer=AdamW(lr=1e-3)),
    "ACCO": lambda: ACCO(optimizer=AdamW(lr=1e-3)),
    "DPU": lambda: DPU(optimizer=AdamW(lr=1e-3), warmup=0),
    "WP": lambda: WP(optimizer=AdamW(lr=1e-3)),
}
FORMULAS: Mapping[str, tuple[str, Callable[[float, float], float]]] = {
    "DDP": ("c + m", lambda c_s, m_s: c_s + m_s),
    "ZeRO-1": ("c + m", lambda c_s, m_s: c_s + m_s),
    "ACCO": ("max(c, 2m)", lambda c_s, m_s: max(c_s, 2 * m_s)),
    "DPU": ("max(c, m)", max),
    "WP": ("max(c, m)", max),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model and its links: from how many islands on do they wait?"""

    name: str
    params: float  # sent in bfloat16
    far: Link  # between machines
    near: tuple[Link, int] | None  # the link between islands of one machine, and their number; None: one island per machine
    batch_s: float  # computation per update
    why: str  # the source of the link and of batch_s

    def link(self, islands: int) -> Link:
        """The slowest link of the ring."""
        return self.near[0] if self.near is not None and islands <= self.near[1] else self.far


ISLANDS = (2, 4, 8, 16, 24, 32, 48, 64)
SETTINGS = (
    Setting(
        name="7B, 8 GPUs a node",
        params=6.74e9,
        far=Link(latency_s=20e-6, bandwidth_mbit_per_s=100e3),
        near=(Link(latency_s=5e-6, bandwidth_mbit_per_s=2.4e6), 8),
        batch_s=0.53,
        why="as in the paper's Fig. 4: NVLink of 300 GB/s within a node, 100 Gbit/s between; c is one forward and backward pass "
        "over 2,048 tokens at half of an A100's 312 TFLOP/s",
    ),
    Setting(
        name="125M, 10 Gbit/s",
        params=123.6e6,
        far=Link(latency_s=2e-3, bandwidth_mbit_per_s=10e3),
        near=None,
        batch_s=0.93,
        why="machines in one city; c is a batch of 192 sequences of 1,024 tokens at that rate",
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = benchmark_parser(__doc__, "acco_links", page="docs/acco.md", dry=True).parse_args(arguments)
    record = open_record(options, "acco_links")
    keys = [f"2m/c={ratio:g}" for ratio in RATIOS] + [f"{s.name}, {k} islands" for s in SETTINGS for k in ISLANDS]
    missing = [key for key in keys if record.get(key) is None]
    if options.dry_run:
        print(missing_text(missing))
        return
    with CellProgress("ACCO and links", len(missing), quiet=options.quiet) as progress:
        for ratio in RATIOS:
            _cell(record, progress, f"2m/c={ratio:g}", lambda ratio=ratio: ratio_cell(ratio))  # type: ignore[misc]
        for setting in SETTINGS:
            for islands in ISLANDS:
                key = f"{setting.name}, {islands} islands"
                _cell(record, progress, key, lambda s=setting, k=islands: islands_cell(s, k))  # type: ignore[misc]
    sweep = [record[f"2m/c={ratio:g}"] for ratio in RATIOS]
    wide = {setting.name: [record[f"{setting.name}, {k} islands"] for k in ISLANDS] for setting in SETTINGS}
    sections = [outcome_section(sweep, wide), sweep_section(sweep), islands_section(wide)]
    save_figure(lambda both: figure(*both), (sweep, wide), record.plot)
    caption = "time per update, and exchanges"
    record.publish("When overlap pays", sections, plot=caption, docs=(options.docs, "acco_links"))


def _cell(record: Record, progress: CellProgress, key: str, measure: Callable[[], dict[str, Any]]) -> None:
    if record.get(key) is None:
        progress.begin(key)
        progress.end(f"{key}: {len(record.add(key, measure()))} figures")


# -------------------------------------------------------------------------------------------------------------- measuring


def ratio_cell(ratio: float) -> dict[str, Any]:
    """Time per update and payload bytes of every algorithm at this ratio of two exchanges to computation, 2m/c."""
    exchange_s = ratio * C_S / 2
    link = Link(latency_s=0.0, bandwidth_mbit_per_s=mbit_per_s(exchange_s, len(STEP_TIMES_S)))
    cluster = Cluster(islands=len(STEP_TIMES_S), step_time_s=STEP_TIMES_S, link=link)
    return {"ratio": ratio, "m_s": exchange_s, **{name: update(make(), cluster) for name, make in ALGORITHMS.items()}}


def islands_cell(setting: Setting, islands: int) -> dict[str, Any]:
    """One exchange between islands, and an update of ZeRO-1 and ACCO. The bandwidth is scaled down with the model."""
    link, share = setting.link(islands), PARAMS * PARAM_BYTES / (setting.params * 2)
    scaled = Link(latency_s=link.latency_s, bandwidth_mbit_per_s=link.bandwidth_mbit_per_s * share)
    cluster = Cluster(islands=islands, step_time_s=(setting.batch_s,), link=scaled)
    zero1, acco = update(ALGORITHMS["ZeRO-1"](), cluster), update(ALGORITHMS["ACCO"](), cluster)
    m_s = zero1["update_s"] - setting.batch_s
    return {"islands": islands, "c_s": setting.batch_s, "m_s": m_s, "ZeRO-1": zero1, "ACCO": acco}


def mbit_per_s(exchange_s: float, islands: int) -> float:
    """The bandwidth at which a reduce-scatter and an all-gather of the model take this time, without latency."""
    piece_bytes = PARAMS * PARAM_BYTES / islands
    return 2 * (islands - 1) * piece_bytes * 8 / exchange_s / 1e6


def update(algorithm: Algorithm[Any], cluster: Cluster) -> dict[str, Any]:
    """Virtual seconds per update in steady state, the largest deviation of a single update, and payload bytes per island."""
    done = simulate(algorithm, steps=UPDATES, workload=WORKLOAD, cluster=cluster, evaluate_every=UPDATES)
    ends = [event.time_s for event in done.of(RoundFinished)][SETTLED - 1 :]
    update_s = (ends[-1] - ends[0]) / (len(ends) - 1)
    apart = max(abs(two - one - update_s) for one, two in pairwise(ends))
    sent = [event.sent_bytes for event in done.of(Exchanged) if event.round == UPDATES - 1]
    return {"update_s": update_s, "apart_s": apart, "sent_bytes": [sum(each) for each in zip(*sent, strict=True)]}


# ------------------------------------------------------------------------------------------------------------- the report


def outcome_section(sweep: Sequence[dict[str, Any]], wide: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """The verdicts."""
    furthest = max(
        abs(cell[name]["update_s"] - formula(C_S, cell["m_s"])) for cell in sweep for name, (_, formula) in FORMULAS.items()
    )
    unsteady = max(cell[name]["apart_s"] for cell in sweep for name in FORMULAS)
    twice = all(cell["ACCO"]["sent_bytes"] == [2 * sent for sent in cell["ZeRO-1"]["sent_bytes"]] for cell in sweep)
    wins = [cell["ratio"] for cell in sweep if cell["ACCO"]["update_s"] < cell["ZeRO-1"]["update_s"] - 1e-9]
    loses = [cell["ratio"] for cell in sweep if cell["ACCO"]["update_s"] > cell["ZeRO-1"]["update_s"] + 1e-9]
    lines = [
        f"{holds_text(furthest < 1e-9)}: every measured time per update equals the formula's. The largest difference is "
        f"{furthest:.1e} s, and single updates differ from the mean by at most {unsteady:.1e} s.",
        f"{holds_text(twice)}: ACCO's payload bytes per commit are exactly twice ZeRO-1's, on every island.",
        f"ACCO is faster than ZeRO-1 at 2m/c = {_listed(wins)}, and slower at {_listed(loses)}: if one exchange takes longer than "
        f"the computation of the batch (m > c), ZeRO-1 is faster, and DiLoCo is the better choice.",
        *(f"{name}: {_idle_from(cells)}" for name, cells in wide.items()),
    ]
    return f"## Outcome\n\n{bullets(lines)}"


def _idle_from(cells: Sequence[dict[str, Any]]) -> str:
    waiting = [cell["islands"] for cell in cells if cell["ACCO"]["update_s"] > cell["c_s"] * (1 + 1e-9)]
    mostly = [cell["islands"] for cell in cells if cell["ACCO"]["update_s"] > 2 * cell["c_s"]]
    if not waiting:
        return f"up to {cells[-1]['islands']} islands ACCO hides the whole exchange."
    idle = f"at a fixed batch ACCO waits from {waiting[0]} islands on"
    return idle + (f", and most of the time from {mostly[0]} on." if mostly else ", and never most of the time.")


def sweep_section(sweep: Sequence[dict[str, Any]]) -> str:
    """Measured times and formulas."""
    rows = []
    for cell in sweep:
        found = {name: cell[name]["update_s"] for name in FORMULAS}
        best = min(found.values())
        fastest = [name for name, time_s in found.items() if time_s < best + 1e-9]
        measured = [f"{found[name]:.6f}" for name in FORMULAS]
        rival = (
            "ACCO" if found["ACCO"] < found["ZeRO-1"] - 1e-9 else "ZeRO-1" if found["ACCO"] > found["ZeRO-1"] + 1e-9 else "equal"
        )
        formulas = [f"{FORMULAS[name][1](C_S, cell['m_s']):.6f}" for name in ("ZeRO-1", "ACCO", "DPU")]
        rows.append([f"{cell['ratio']:g}", f"{cell['m_s']:g}", *measured, *formulas, ", ".join(fastest), rival])
    headings = ["2m/c", "m (s)", *FORMULAS, "c + m", "max(c, 2m)", "max(c, m)", "fastest", "ACCO or ZeRO-1"]
    sent = {name: sum(sweep[0][name]["sent_bytes"]) / len(STEP_TIMES_S) for name in FORMULAS}
    payload = ", ".join(f"{name} {human_bytes(each)}" for name, each in sent.items())
    note = (
        f"Virtual seconds per update in steady state, on {len(STEP_TIMES_S)} islands that need "
        f"{', '.join(map(str, STEP_TIMES_S))} s for a batch (c = {C_S:g} s), over links without latency. DPU and WP are fast "
        f"because their gradients are late: see the losses in docs/acco.md. Payload bytes per update and island: {payload}."
    )
    return f"## Time per update against bandwidth\n\n{note}\n\n{markdown_table(headings, rows)}"


def islands_section(wide: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """The time of an exchange, and idle time."""
    parts = [
        "## An exchange against the number of islands\n\nA ring, latency included, with the bytes of the whole model in bfloat16. "
        "Idle: the share of an update in which an island does not compute. ACCO has a fixed batch here. With `batch=free` it would "
        "not idle, but commit the larger batches that fit into two exchanges."
    ]
    for setting in SETTINGS:
        rows = []
        for cell in wide[setting.name]:
            idle = [1 - cell["c_s"] / cell[name]["update_s"] for name in ("ZeRO-1", "ACCO")]
            share = cell["m_s"] / cell["c_s"]
            rows.append([str(cell["islands"]), f"{cell['m_s']:.4f}", f"{share:.2f}", *(human_percent(max(0.0, i)) for i in idle)])
        table = markdown_table(["islands", "m (s)", "m/c", "ZeRO-1 idle", "ACCO idle"], rows)
        parts.append(f"**{setting.name}**: {setting.why} ({setting.batch_s:g} s).\n\n{table}")
    return "\n\n".join(parts)


def _listed(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:g}" for ratio in ratios) or "no measured ratio"


# --------------------------------------------------------------------------------------------------------------- the plot


def figure(sweep: Sequence[dict[str, Any]], wide: Mapping[str, Sequence[dict[str, Any]]]) -> Any:
    """Measured times on the formulas' lines, and exchanges against the number of islands."""
    drawn, (times, exchanges) = new_figure(2)
    drawn.set_size_inches(11, 4.4)
    ratios = [0.02 * step for step in range(1, 206)]
    for colour, name in zip(COLOURS, ("ZeRO-1", "ACCO", "DPU"), strict=False):
        words, formula = FORMULAS[name]
        times.plot(
            ratios, [formula(C_S, ratio * C_S / 2) for ratio in ratios], color=colour, linewidth=1.4, label=f"{name}: {words}"
        )
        measured = [cell[name]["update_s"] for cell in sweep]
        times.plot([cell["ratio"] for cell in sweep], measured, color=colour, linestyle="", marker="o", markersize=5)
    times.axvline(2.0, color="#888888", linewidth=1.0, linestyle=":")
    times.set_xlabel("2m/c: two exchanges over computation")
    times.set_ylabel("virtual time per update (s)")
    times.set_ylim(bottom=0)
    times.legend(frameon=False, fontsize=10, title="lines: formulas, dots: measured")
    for colour, (name, cells) in zip(COLOURS, wide.items(), strict=False):
        shares = [cell["m_s"] / cell["c_s"] for cell in cells]
        exchanges.plot([cell["islands"] for cell in cells], shares, color=colour, marker="o", markersize=5, label=name)
    for share, words in ((0.5, "ACCO waits"), (1.0, "ZeRO-1 is faster")):
        exchanges.axhline(share, color="#888888", linewidth=1.0, linestyle=":")
        exchanges.annotate(f"above: {words}", (max(ISLANDS), share), ha="right", va="bottom", fontsize=9, color="#555555")
    exchanges.set_yscale("log")
    exchanges.set_xlabel("islands")
    exchanges.set_ylabel("one exchange over one batch, m/c")
    exchanges.legend(frameon=False, fontsize=10)
    return drawn


if __name__ == "__main__":
    script(main)
