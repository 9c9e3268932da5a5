"""ACCO's claims on one GPU and real text: gradients travel while others are computed.

    python benchmarks/evidence_acco.py --text prepared/wiki                    about 15 minutes of one H200
    python benchmarks/evidence_acco.py --text prepared/wiki --only line        virtual time over lines alone
    python benchmarks/evidence_acco.py --text prepared/small --quick           in miniature on the CPU

See `evidence.py` for the text and for going on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cells import Outcome, Row
from claims import Claim, higher
from evidence import Evidence, OnGpu, plot_curves
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
        step_s: a batch's computing.
    """

    steps: int = 1500
    warm_start: int = 0
    batch_size: int = 16
    islands: int = 8
    evaluate_every: int = 250
    mbit_per_s: float = 1000
    dpu_warmup: int = 40
    lines: tuple[int, ...] = (100, 1000, 3000, 10000, 100000)
    line_steps: int = 12
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
    return {DEFAULT: plan.row(ACCO, DEFAULT), DDP: plan.row(DDP, DDP)}


def groups(plan: Plan) -> list[Group]:
    """All tables."""
    return [_methods(plan), _lines(plan)]


def _methods(plan: Plan) -> Group:
    rows = {
        DDP: plan.row(DDP, DDP),
        DEFAULT: plan.row(ACCO, DEFAULT),
        DPU: plan.row(DPU, DPU),
        "DPU, no warm-up": plan.row(DPU, "DPU, no warm-up", "algorithm.warmup=0"),
        ZERO1: plan.row(ZERO1, ZERO1),
        WP: plan.row(WP, WP),
    }
    note = "Every row commits the same samples in as many updates. The default is ACCO. Virtual time as a share of DDP's."
    against = dict.fromkeys(rows, DDP)
    return Group(name="methods", title="Loss at equal samples", note=note, rows=rows, against=against, timed=against)


def _lines(plan: Plan) -> Group:
    rows: dict[str, Row] = {}
    timed: dict[str, str] = {}
    for speed in plan.lines:
        small = (f"train.steps={plan.line_steps}", "train.batch_size=2", "train.compile=false", "optimizer.lr.warmup=2")
        settings = (f"cluster.link.bandwidth_mbit_per_s={speed}", *small)
        for method in (DDP, ACCO, DPU):
            more = ("algorithm.warmup=0",) if method == DPU else ()
            rows[f"{method}, {speed} Mbit/s"] = plan.row(method, f"{method}, {speed} Mbit/s", *settings, *more)
            timed[f"{method}, {speed} Mbit/s"] = f"{DDP}, {speed} Mbit/s"
    note = (
        f"{plan.line_steps} updates each of a small batch, which is what virtual time needs; their losses mean nothing. A batch "
        f"takes {plan.step_s:g} s to compute."
    )
    return Group(name="line", title="Virtual time over lines", note=note, rows=rows, against={"": ""}, timed=timed)


def claims(plan: Plan) -> list[Claim]:
    """What is asked of ACCO, and what the paper says of the others."""
    return [
        Claim(
            text=f"ACCO ends within {CLOSE} of DDP (the paper: the curves are one).",
            terms=((1.0, DEFAULT), (-1.0, DDP)),
            above=-CLOSE,
            below=CLOSE,
        ),
        Claim(text="ZeRO-1 is DDP.", terms=((1.0, ZERO1), (-1.0, DDP)), above=-0.005, below=0.005),
        higher("DPU ends above DDP also with ZeRO-Offload's warm-up (the paper: it is not enough).", DPU, DDP),
        higher("DPU ends above DDP without a warm-up (the paper: clearly).", "DPU, no warm-up", DDP),
        higher("WP ends above DDP (the paper: it is worse early on).", WP, DDP),
        higher("DPU ends above ACCO.", DPU, DEFAULT),
    ]


def introduction(plan: Plan, default: Outcome) -> str:
    params = default.mean("params")
    size = f" of {params:,.0f} parameters" if params is not None else ""
    return (
        f"A decoder{size} on {plan.islands} equal islands that exchange at every update, {plan.steps} of them, over lines of "
        f"{plan.mbit_per_s:g} Mbit/s; no warm start. DDP, ACCO and DPU have three seeds, all others one. This is ACCO, and a row "
        f"adds the settings it shows, or has another algorithm:\n\n```\n{default.row.command}\n```"
    )


EVIDENCE = Evidence(
    name="evidence_acco",
    title="ACCO on one GPU and real text",
    about=__doc__ or "",
    plan=plan,
    groups=groups,
    standing=standing,
    headline=lambda plan: (DEFAULT, DDP, DPU),
    introduction=introduction,
    claims=claims,
    plot=lambda plan, outcomes, path: plot_curves({DDP: DDP, DEFAULT: ACCO, DPU: DPU, WP: WP}, outcomes, path),
    share="of DDP's",
)


def main(arguments: Sequence[str] | None = None) -> None:
    EVIDENCE.main(arguments)


if __name__ == "__main__":
    script(main)
