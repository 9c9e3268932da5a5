"""ACCO's claims on one GPU and real text: communication overlaps with computation.

    python benchmarks/evidence_acco.py --text prepared/wiki --processes 6      about 5 minutes of one H200
    python benchmarks/evidence_acco.py --text prepared/wiki --only link        virtual time over links only
    python benchmarks/evidence_acco.py --text prepared/small --quick           smoke test on the CPU

See `evidence.py` for the text and for continuing a record.
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
from record import holds_text, markdown_table, script

DDP, ZERO1, ACCO, DPU, WP = "DDP", "ZeRO-1", "ACCO", "DPU", "WP"
RECIPES = {DDP: "demo-ddp", ZERO1: "demo-zero1", ACCO: "demo-acco", DPU: "demo-dpu", WP: "demo-wp"}
CLOSE = 0.02
"""Allowed difference between the losses of ACCO and data-parallel training."""


@dataclass(frozen=True, kw_only=True)
class Plan(OnGpu):
    """The workload and the values of the rows."""

    steps: int = 1000
    warm_start: int = 0
    islands: int = 8
    evaluate_every: int = 200
    latency_s: float = 0.001
    mbit_per_s: float = 3000
    dpu_warmup: int = 40  # updates of ZeRO-Offload's warm-up
    bandwidths: tuple[int, ...] = (100, 300, 1000, 3000, 10000, 100000)  # Mbit/s
    link_steps: int = 36  # updates on each link
    far_s: float = 0.03  # the latency of one more link, at the bandwidth of all other rows
    step_s: float = 1.0  # computation per batch
    low_lr: float = 0.0005  # of the rows with a lower rate

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
        bandwidths=(1, 100),
        link_steps=3,
        model="layers=1,width=16,heads=2,head_size=8",
        seq_len=16,
        eval_batches=2,
        batch_size=2,
        warmup=2,
    )


def standing(plan: Plan) -> dict[str, Row]:
    """The rows that others are compared with."""
    return {DEFAULT: plan.row(ACCO, ACCO), ACCO: plan.row(ACCO, ACCO), DDP: plan.row(DDP, DDP)}


def groups(plan: Plan) -> list[Group]:
    """All tables."""
    return [_methods(plan), _links(plan)]


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
        f"All rows commit the same samples in the same number of updates. Virtual time is over that of DDP, whose exchange does "
        f"not overlap with the computation of the same batch. The last rows have a lower rate than the {plan.lr:g} of all others, "
        f"since late gradients may need one."
    )
    against = dict.fromkeys(rows, DDP) | dict.fromkeys(lower, f"{DDP}, lr {plan.low_lr:g}")
    return Group(name="methods", title="Loss at equal samples", note=note, rows=rows, against=against, timed=against)


def _links(plan: Plan) -> Group:
    rows: dict[str, Row] = {}
    timed: dict[str, str] = {}
    train = f"train=Train(steps={plan.link_steps},batch_size=2)"
    small = (train, "optimizer.lr.warmup=2", "data.seq_len=16", "data.eval_batches=1")
    for link, settings in _link_settings(plan).items():
        for method in RECIPES:
            more = ("algorithm.warmup=0",) if method == DPU else ()  # a warm-up would be most of these updates
            rows[_on(method, link)] = plan.row(method, _on(method, link), *settings, *small, *more)
            timed[_on(method, link)] = _on(DDP, link)
    note = (
        f"Virtual seconds per update, mean of {plan.link_steps} updates. The batches are small and computed on a CPU: virtual time "
        f"does not depend on them, and the losses mean nothing. A batch takes {plan.step_s:g} s to compute. Links have a latency "
        f"of {1000 * plan.latency_s:g} ms, except in the last row, which has the bandwidth of the first table: an exchange pays "
        f"the latency {plan.islands - 1} times on its way around the ring. Before the overlap starts, ACCO needs the time of half "
        f"a batch, DPU and WP that of a whole one."
    )
    make = partial(_links_table, plan)
    return Group(name="link", title="Virtual time over links", note=note, rows=rows, against={"": ""}, timed=timed, table=make)


def _link_settings(plan: Plan) -> dict[str, tuple[str, ...]]:
    links = {_bandwidth(mbit): (f"cluster.link.bandwidth_mbit_per_s={mbit}",) for mbit in plan.bandwidths}
    links[f"{_bandwidth(plan.mbit_per_s)}, {1000 * plan.far_s:g} ms"] = (f"cluster.link.latency_s={plan.far_s:g}",)
    return links


def _bandwidth(mbit_per_s: float) -> str:
    return f"{mbit_per_s:g} Mbit/s"


def _on(method: str, link: str) -> str:
    return f"{method}, {link}"


def _links_table(plan: Plan, outcomes: Mapping[str, Outcome]) -> str:
    rows = []
    for link in _link_settings(plan):
        figures = [*(_update_s(plan, method, link, outcomes) for method in RECIPES), _share(link, outcomes)]
        rows.append([link, *("-" if figure is None else f"{figure:.3f}" for figure in figures)])
    return markdown_table(["link", *RECIPES, "ACCO over DDP"], rows)


def _update_s(plan: Plan, method: str, link: str, outcomes: Mapping[str, Outcome]) -> float | None:
    """Virtual seconds per update; None if the row was not run."""
    time_s = outcomes[_on(method, link)].mean("virtual_time_s") if _on(method, link) in outcomes else None
    return None if time_s is None else time_s / plan.link_steps


def _share(link: str, outcomes: Mapping[str, Outcome]) -> float | None:
    """ACCO's virtual time over DDP's; None if one of them was not run."""
    acco, ddp = outcomes.get(_on(ACCO, link)), outcomes.get(_on(DDP, link))
    return None if acco is None or ddp is None else time_ratio(acco, ddp)


def claims(plan: Plan) -> list[Claim]:
    """A bound on ACCO's loss, and the paper's claims about the other methods."""
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
        f"{plan.islands} equal islands that exchange at every update, {plan.steps} updates, over links of "
        f"{plan.mbit_per_s:g} Mbit/s; no warm start. DDP, ACCO and DPU have three seeds, all others one."
    )


def plot(plan: Plan, outcomes: Mapping[str, Outcome], path: Path) -> str | None:
    """Loss against virtual time, and time per update against bandwidth."""
    methods = [method for method in RECIPES if method in outcomes and outcomes[method].curves]
    times = {method: _times(plan, method, outcomes) for method in RECIPES}
    if len(methods) < 2 and not any(times.values()):
        return None
    save_figure(lambda found: _figure(methods, times, found), outcomes, path)
    return "loss against virtual time, and seconds per update against bandwidth"


def timed(plan: Plan, outcomes: Mapping[str, Outcome]) -> list[str]:
    """The links over which ACCO is faster than DDP."""
    found = {link: share for link in _link_settings(plan) if (share := _share(link, outcomes)) is not None}
    faster = [link for link, share in found.items() if share < 1]
    if not found:
        return []
    if not faster:
        return [f"{holds_text(False)}: ACCO takes less virtual time than DDP."]
    best = min(faster, key=lambda link: found[link])
    slower = [link for link in found if link not in faster]
    return [
        f"{holds_text(True)}: ACCO takes less virtual time than DDP over {'; '.join(faster)}. The least is {found[best]:.3f} of "
        f"DDP's, over {best}." + (f" Over {'; '.join(slower)} it takes more: it exchanges twice per update." if slower else "")
    ]


def _times(plan: Plan, method: str, outcomes: Mapping[str, Outcome]) -> dict[int, float]:
    """Virtual seconds per update, by bandwidth."""
    found = {mbit: _update_s(plan, method, _bandwidth(mbit), outcomes) for mbit in plan.bandwidths}
    return {mbit: time_s for mbit, time_s in found.items() if time_s is not None}


def _figure(methods: Sequence[str], times: Mapping[str, Mapping[int, float]], outcomes: Mapping[str, Outcome]) -> Any:
    figure, (curves, links) = new_figure(2)
    for method, colour in zip(RECIPES, COLOURS, strict=False):
        if method in methods:
            for curve in outcomes[method].curves:
                curves.plot([time_s / 60 for time_s, _, _ in curve], [loss for _, _, loss in curve], color=colour, alpha=0.8)
        if times[method]:
            links.plot(list(times[method]), list(times[method].values()), color=colour, marker="o", markersize=4)
        curves.plot([], [], color=colour, label=method)
    curves.set(xlabel="virtual time (minutes)", ylabel="validation loss")
    links.set(xscale="log", yscale="log", xlabel="bandwidth of each link (Mbit/s)", ylabel="seconds per update")
    curves.legend(frameon=False, fontsize=10)
    return figure


EVIDENCE = Evidence(
    name="evidence_acco",
    title="ACCO on one GPU and real text",
    about=__doc__ or "",
    plan=plan,
    groups=groups,
    standing=standing,
    default=ACCO,
    headline=lambda plan: (ACCO, DDP, DPU),
    introduction=introduction,
    reading="The command runs ACCO. A row adds the settings it shows, or has another algorithm:",
    claims=claims,
    plot=plot,
    share="of DDP's",
    verdicts=timed,
)


def main(arguments: Sequence[str] | None = None) -> None:
    EVIDENCE.main(arguments)


if __name__ == "__main__":
    script(main)
