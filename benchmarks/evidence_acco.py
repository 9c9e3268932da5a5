"""ACCO's claims on one GPU and real text: communication overlaps with computation.

    python benchmarks/evidence_acco.py --text prepared/wiki --processes 6      about 5 minutes of one H200
    python benchmarks/evidence_acco.py --text prepared/wiki --only line        virtual time over lines alone
    python benchmarks/evidence_acco.py --text prepared/small --quick           in miniature on the CPU

See `evidence.py` for the text and for going on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ablations import DEFAULT, Group
from atoll.telemetry.plot_style import COLOURS, new_figure, save_figure
from cells import Outcome, Row
from claims import Claim, higher
from evidence import Evidence, OnGpu
from figure_text import decoder_text, time_ratio
from record import markdown_table, script

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
        low_lr: of the rows with a lower rate.
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
    low_lr: float = 0.0005

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
        seq_len=16,
        eval_batches=2,
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
    lower = {f"{method}, lr {plan.low_lr:g}": method for method in (DDP, ACCO, DPU)}
    settings = (f"optimizer.lr.lr={plan.low_lr:g}", f"optimizer.lr.floor={plan.floor * plan.low_lr:g}")
    rows |= {label: plan.row(method, label, *settings) for label, method in lower.items()}
    note = (
        f"Every row commits the same samples in as many updates. Virtual time as a share of DDP's, whose exchange does not overlap "
        f"with the computing of the same batch. The last rows have a lower rate than the {plan.lr:g} of all others, since late "
        f"gradients may need one."
    )
    against = dict.fromkeys(rows, DDP) | dict.fromkeys(lower, f"{DDP}, lr {plan.low_lr:g}")
    return Group(name="methods", title="Loss at equal samples", note=note, rows=rows, against=against, timed=against)


def _lines(plan: Plan) -> Group:
    rows: dict[str, Row] = {}
    timed: dict[str, str] = {}
    train = f"train=Train(steps={plan.line_steps},batch_size=2)"
    small = (train, "optimizer.lr.warmup=2", "data.seq_len=16", "data.eval_batches=1")
    for line, settings in _tried(plan).items():
        for method in RECIPES:
            more = ("algorithm.warmup=0",) if method == DPU else ()  # they would be most of so few
            rows[_on(method, line)] = plan.row(method, _on(method, line), *settings, *small, *more)
            timed[_on(method, line)] = _on(DDP, line)
    note = (
        f"Seconds of virtual time an update, over {plan.line_steps} of them, with few and short sequences on a CPU, which is what "
        f"virtual time needs; their losses mean nothing. A batch takes {plan.step_s:g} s to compute. Lines have "
        f"{1000 * plan.latency_s:g} ms, but for the last row, whose speed is that of the first table: an exchange waits for them "
        f"{plan.islands - 1} times on its way around the ring. Until it flows, ACCO takes half a batch's time more, and DPU and WP "
        f"a whole one's."
    )
    drawn = partial(_lines_table, plan)
    return Group(name="line", title="Virtual time over lines", note=note, rows=rows, against={"": ""}, timed=timed, drawn=drawn)


def _tried(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Lines, with their settings."""
    lines = {_speed(speed): (f"cluster.link.bandwidth_mbit_per_s={speed}",) for speed in plan.lines}
    lines[f"{_speed(plan.mbit_per_s)}, {1000 * plan.far_s:g} ms"] = (f"cluster.link.latency_s={plan.far_s:g}",)
    return lines


def _speed(mbit_per_s: float) -> str:
    return f"{mbit_per_s:g} Mbit/s"


def _on(method: str, line: str) -> str:
    return f"{method}, {line}"


def _lines_table(plan: Plan, outcomes: Mapping[str, Outcome]) -> str:
    rows = []
    for line in _tried(plan):
        times = [_update_s(plan, method, line, outcomes) for method in RECIPES]
        share = _share(line, outcomes)
        told = [f"{time_s:.3f}" if time_s is not None else "-" for time_s in times]
        rows.append([line, *told, f"{share:.3f}" if share is not None else "-"])
    return markdown_table(["line", *RECIPES, "ACCO's of DDP's"], rows)


def _update_s(plan: Plan, method: str, line: str, outcomes: Mapping[str, Outcome]) -> float | None:
    """Virtual seconds of an update; None if that was not run."""
    time_s = outcomes[_on(method, line)].mean("virtual_time_s") if _on(method, line) in outcomes else None
    return None if time_s is None else time_s / plan.line_steps


def _share(line: str, outcomes: Mapping[str, Outcome]) -> float | None:
    """ACCO's virtual time as a share of DDP's; None if one of them was not run."""
    ours, theirs = outcomes.get(_on(ACCO, line)), outcomes.get(_on(DDP, line))
    return None if ours is None or theirs is None else time_ratio(ours, theirs)


def claims(plan: Plan) -> list[Claim]:
    """What is asked of ACCO, and what the paper says of the others."""
    return [
        Claim(
            text=f"ACCO ends within {CLOSE} of DDP (the paper: one curve on TinyStories; on OpenWebText -0.4 % on 8 GPUs, +3.7 % "
            "on 32).",
            terms=((1.0, ACCO), (-1.0, DDP)),
            above=-CLOSE,
            below=CLOSE,
        ),
        higher("DPU ends above DDP also with ZeRO-Offload's warm-up (the paper: it is not enough).", DPU, DDP),
        higher("DPU ends above DDP without a warm-up (the paper: clearly).", "DPU, no warm-up", DDP),
        higher("WP ends above DDP (the paper: it is worse early on).", WP, DDP),
        higher("DPU ends above ACCO.", DPU, ACCO),
        higher("DPU ends above DDP at a lower rate, too.", f"{DPU}, lr {plan.low_lr:g}", f"{DDP}, lr {plan.low_lr:g}"),
    ]


def introduction(plan: Plan, default: Outcome) -> str:
    return (
        f"{decoder_text(default)} on "
        f"{plan.islands} equal islands that exchange at every update, {plan.steps} of them, over lines of "
        f"{plan.mbit_per_s:g} Mbit/s; no warm start. DDP, ACCO and DPU have three seeds, all others one."
    )


def plot(plan: Plan, outcomes: Mapping[str, Outcome], path: Path) -> str | None:
    """Loss against virtual time, and the time of an update over lines."""
    methods = [method for method in RECIPES if method in outcomes and outcomes[method].curves]
    times = {method: _times(plan, method, outcomes) for method in RECIPES}
    if len(methods) < 2 and not any(times.values()):
        return None
    save_figure(lambda found: _figure(methods, times, found), outcomes, path)
    return "loss against virtual time, and seconds of an update over the speed of lines"


def timed(plan: Plan, outcomes: Mapping[str, Outcome]) -> list[str]:
    """Where ACCO's overlap pays."""
    found = {line: share for line in _tried(plan) if (share := _share(line, outcomes)) is not None}
    less = [line for line, share in found.items() if share < 1]
    if not found:
        return []
    if not less:
        return ["**does not hold here**: ACCO takes less virtual time than DDP."]
    best = min(less, key=lambda line: found[line])
    told = f"ACCO takes less virtual time than DDP over {'; '.join(less)}. It is least over {best}: {found[best]:.3f} of DDP's."
    more = [line for line in found if line not in less]
    return [f"**holds here**: {told}" + (f" Over {'; '.join(more)} it takes more: it exchanges twice an update." if more else "")]


def _times(plan: Plan, method: str, outcomes: Mapping[str, Outcome]) -> dict[int, float]:
    """Virtual seconds of an update, by the line's speed."""
    found = {speed: _update_s(plan, method, _speed(speed), outcomes) for speed in plan.lines}
    return {speed: time_s for speed, time_s in found.items() if time_s is not None}


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
    introduction=introduction,
    reading="This is ACCO, and a row adds the settings it shows, or has another algorithm:",
    claims=claims,
    plot=plot,
    share="of DDP's",
    verdicts=timed,
)


def main(arguments: Sequence[str] | None = None) -> None:
    EVIDENCE.main(arguments)


if __name__ == "__main__":
    script(main)
