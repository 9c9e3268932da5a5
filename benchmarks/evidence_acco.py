"""ACCO's claims on one GPU and real text: gradients travel while others are computed.

    python benchmarks/evidence_acco.py --text prepared/wiki                    about 15 minutes of one H200
    python benchmarks/evidence_acco.py --text prepared/wiki --only line        virtual time over lines alone
    python benchmarks/evidence_acco.py --text prepared/small --quick           in miniature on the CPU

See `evidence.py` for the text and for going on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.telemetry.drawing import COLOURS, new_figure, save_figure
from cells import Outcome, Row
from claims import Claim, higher
from evidence import Evidence, OnGpu
from groups import DEFAULT, Group
from record import script

DDP, ZERO1, ACCO, DPU, WP = "DDP", "ZeRO-1", "ACCO", "DPU", "WP"
RECIPES = {DDP: "demo-ddp", ZERO1: "demo-zero1", ACCO: "demo-acco", DPU: "demo-dpu", WP: "demo-wp"}
CLOSE = 0.02
"""How far from data-parallel training ACCO may end."""


@dataclass(frozen=True, kw_only=True)
class Plan(OnGpu):
    """The workload, and the values that rows run through.

    Attributes:
        dpu_warmup: updates of ZeRO-Offload's warm-up.
        lines: bandwidths in Mbit/s.
        line_steps: updates that are simulated on each.
        far_s: the latency of lines that are tried besides, at the speed of all other rows.
        step_s: a batch's computing.
    """

    steps: int = 1000
    warm_start: int = 0
    islands: int = 8
    evaluate_every: int = 200
    latency_s: float = 0.001
    mbit_per_s: float = 3000
    dpu_warmup: int = 40
    lines: tuple[int, ...] = (100, 300, 1000, 3000, 10000, 100000)
    line_steps: int = 36
    far_s: float = 0.03
    step_s: float = 1.0

    def row(self, method: str, name: str, *settings: str) -> Row:
        algorithm = {
            DDP: "DDP()",
            ZERO1: "ZeRO1()",
            ACCO: "ACCO()",
            DPU: f"DPU(warmup={self.dpu_warmup})",
            WP: "WP()",
        }[method]
        return Row(recipe=RECIPES[method], base=self.settings(algorithm, f"[{self.step_s}]"), settings=settings, name=name)


def plan(quick: bool) -> Plan:
    if not quick:
        return Plan()
    return Plan(
        steps=6,
        islands=2,
        evaluate_every=2,
        dpu_warmup=1,
        lines=(1, 100),
        line_steps=3,
        model="layers=1,width=16,heads=2,head_size=8",
        data="seq_len=16,eval_batches=2",
        batch_size=2,
        warmup=2,
    )


def standing(plan: Plan) -> dict[str, Row]:
    """What the others are compared with."""
    return {DEFAULT: plan.row(ACCO, ACCO), ACCO: plan.row(ACCO, ACCO), DDP: plan.row(DDP, DDP)}


def groups(plan: Plan) -> list[Group]:
    """All tables."""
    return [_methods(plan), _lines(plan)]


def _methods(plan: Plan) -> Group:
    rows = {
        DDP: plan.row(DDP, DDP),
        ACCO: plan.row(ACCO, ACCO),
        DPU: plan.row(DPU, DPU),
        "DPU, no warm-up": plan.row(DPU, "DPU, no warm-up", "algorithm.warmup=0"),
        ZERO1: plan.row(ZERO1, ZERO1),
        WP: plan.row(WP, WP),
    }
    note = "Every row commits the same samples in as many updates. Virtual time as a share of DDP's."
    against = dict.fromkeys(rows, DDP)
    return Group(name="methods", title="Loss at equal samples", note=note, rows=rows, against=against, timed=against)


def _lines(plan: Plan) -> Group:
    rows: dict[str, Row] = {}
    timed: dict[str, str] = {}
    train = f"train=Train(steps={plan.line_steps},batch_size=2)"
    small = (train, "optimizer.lr.warmup=2", "data.seq_len=16", "data.eval_batches=1")
    lines = {f"{speed} Mbit/s": (f"cluster.link.bandwidth_mbit_per_s={speed}",) for speed in plan.lines}
    lines[f"{1000 * plan.far_s:g} ms"] = (f"cluster.link.latency_s={plan.far_s:g}",)
    for line, settings in lines.items():
        for method in RECIPES:
            more = ("algorithm.warmup=0",) if method == DPU else ()  # they would be most of so few
            rows[f"{method}, {line}"] = plan.row(method, f"{method}, {line}", *settings, *small, *more)
            timed[f"{method}, {line}"] = f"{DDP}, {line}"
    note = (
        f"{plan.line_steps} updates each of few and short sequences on a CPU, which is what virtual time needs; their losses mean "
        f"nothing. A batch takes {plan.step_s:g} s to compute. Lines have {1000 * plan.latency_s:g} ms, but for the last rows: an "
        f"exchange waits for them {plan.islands - 1} times on its way around the ring. Until it flows, ACCO takes half a batch's "
        f"time more, and DPU and WP a whole one's."
    )
    return Group(name="line", title="Virtual time over lines", note=note, rows=rows, against={"": ""}, timed=timed)


def claims(plan: Plan) -> list[Claim]:
    """What is asked of ACCO, and what the paper says of the others."""
    return [
        Claim(
            text=f"ACCO ends within {CLOSE} of DDP (the paper: the curves are one).",
            terms=((1.0, ACCO), (-1.0, DDP)),
            above=-CLOSE,
            below=CLOSE,
        ),
        Claim(text="ZeRO-1 is DDP.", terms=((1.0, ZERO1), (-1.0, DDP)), above=-0.005, below=0.005),
        higher("DPU ends above DDP also with ZeRO-Offload's warm-up (the paper: it is not enough).", DPU, DDP),
        higher("DPU ends above DDP without a warm-up (the paper: clearly).", "DPU, no warm-up", DDP),
        higher("WP ends above DDP (the paper: it is worse early on).", WP, DDP),
        higher("DPU ends above ACCO.", DPU, ACCO),
    ]


def introduction(plan: Plan, default: Outcome) -> str:
    params = default.mean("params")
    size = f" of {params:,.0f} parameters" if params is not None else ""
    return (
        f"A decoder{size} on {plan.islands} equal islands that exchange at every update, {plan.steps} of them, over lines of "
        f"{plan.mbit_per_s:g} Mbit/s; no warm start. DDP, ACCO and DPU have three seeds, all others one. This is ACCO, and a row "
        f"adds the settings it shows, or has another algorithm:\n\n```\n{default.row.command}\n```"
    )


def plot(plan: Plan, outcomes: Mapping[str, Outcome], path: Path) -> str | None:
    """Loss against virtual time, and the time of an update over lines."""
    methods = [method for method in RECIPES if method in outcomes and outcomes[method].curves]
    times = {method: _times(plan, method, outcomes) for method in RECIPES}
    if len(methods) < 2 and not any(times.values()):
        return None
    save_figure(lambda found: _figure(methods, times, found), outcomes, path)
    return "loss against virtual time, and seconds of an update over the speed of lines"


def _times(plan: Plan, method: str, outcomes: Mapping[str, Outcome]) -> dict[int, float]:
    """Virtual seconds of an update, by the line's speed."""
    found = {speed: outcomes[_on(method, speed)] for speed in plan.lines if _on(method, speed) in outcomes}
    seconds = {speed: outcome.mean("virtual_time_s") for speed, outcome in found.items()}
    return {speed: time_s / plan.line_steps for speed, time_s in seconds.items() if time_s is not None}


def _on(method: str, speed: int) -> str:
    return f"{method}, {speed} Mbit/s"


def _figure(methods: Sequence[str], times: Mapping[str, Mapping[int, float]], outcomes: Mapping[str, Outcome]) -> Any:
    figure, (curves, lines) = new_figure(2)
    for method, colour in zip(RECIPES, COLOURS, strict=False):
        if method in methods:
            for curve in outcomes[method].curves:
                curves.plot([time_s / 60 for time_s, _, _ in curve], [loss for _, _, loss in curve], color=colour, alpha=0.8)
        if times[method]:
            lines.plot(list(times[method]), list(times[method].values()), color=colour, marker="o", markersize=4)
        curves.plot([], [], color=colour, label=method)
    curves.set(xlabel="virtual time (minutes)", ylabel="validation loss")
    lines.set(xscale="log", yscale="log", xlabel="Mbit/s of each line", ylabel="seconds of an update")
    curves.legend(frameon=False, fontsize=10)
    return figure


EVIDENCE = Evidence(
    name="evidence_acco",
    title="ACCO on one GPU and real text",
    about=__doc__ or "",
    plan=plan,
    groups=groups,
    standing=standing,
    called=ACCO,
    headline=lambda plan: (ACCO, DDP, DPU),
    steady=lambda plan: (ACCO, DDP),
    introduction=introduction,
    claims=claims,
    plot=plot,
    share="of DDP's",
)


def main(arguments: Sequence[str] | None = None) -> None:
    EVIDENCE.main(arguments)


if __name__ == "__main__":
    script(main)
