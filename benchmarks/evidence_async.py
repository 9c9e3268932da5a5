"""Asynchronous Local-SGD's claims on one GPU and real text: nobody waits for the slowest.

    python benchmarks/evidence_async.py --text prepared/wiki --processes 6            about 10 minutes of one H200
    python benchmarks/evidence_async.py --text prepared/wiki --only level             one table
    python benchmarks/evidence_async.py --text prepared/small --quick                 in miniature on the CPU

See `evidence.py` for the text and for going on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from async_claims import pairs, remedies
from async_rows import ASYNC, DELAYED, DILOCO, NAIVE, SYNC, pair
from cells import Outcome, Row
from claims import Claim, alike, higher, lower, unlike
from evidence import Evidence, OnGpu, plot_curves
from groups import DEFAULT, Group
from record import script
from wording import time_ratio

SAME_TOKENS = 0.015
"""A hub stops with the arrival that reaches the local updates, up to a round of all workers too late."""
CLOSE, SHARE = 0.02, 1 / 3
"""How close to synchronous training Delayed Nesterov with Dynamic Local Updates is to end, and in what share of its time."""


@dataclass(frozen=True, kw_only=True)
class Plan(OnGpu):
    """The workload, and the values that rows run through.

    Attributes:
        levels: how much the workers differ; the last is that of all other rows.
        nesterov: DiLoCo's outer rule, and the naive one at every arrival.
        delayed: Delayed Nesterov.
        window_s: how long the hub waits for others, with Dynamic Local Updates.
        slow_mbit_per_s: of slower lines, which are tried besides.
    """

    warm_start: int = 1000
    inner_steps: int = 50
    islands: int = 4
    evaluate_every: int = 250
    mbit_per_s: float = 1000
    levels: tuple[str, ...] = ("none", "slight", "moderate", "very")
    nesterov: str = "Nesterov(lr=0.7,momentum=0.9)"
    delayed: str = "DelayedNesterov(lr=0.7,momentum=0.9,period=4)"
    window_s: float = 3.0
    slow_mbit_per_s: float = 100

    def row(self, recipe: str, name: str, algorithm: str, *settings: str) -> Row:
        return Row(recipe=recipe, base=self.settings(algorithm, self.levels[-1]), settings=settings, name=name)

    def sync(self, name: str, *settings: str, outer: str | None = None) -> Row:
        """DiLoCo."""
        return self.row(DILOCO, name, f"DiLoCo(inner_steps={self.inner_steps},outer={outer or self.nesterov})", *settings)

    def own(self, name: str, *settings: str) -> Row:
        """Delayed Nesterov with Dynamic Local Updates."""
        options = f"inner_steps={self.inner_steps},outer={self.delayed},pace=given,grace_s={self.window_s}"
        return self.row(ASYNC, name, f"AsyncLocalSGD({options})", *settings)

    def arriving(self, name: str, outer: str, *settings: str, weight: str = "1/k") -> Row:
        """An outer rule at every arrival: no pace, and nobody waits."""
        return self.row(ASYNC, name, f"AsyncLocalSGD(inner_steps={self.inner_steps},outer={outer},weight={weight})", *settings)

    def naive(self, name: str, *settings: str) -> Row:
        return self.arriving(name, self.nesterov, *settings)


def plan(quick: bool) -> Plan:
    if not quick:
        return Plan()
    return Plan(
        steps=6,
        warm_start=2,
        inner_steps=2,
        levels=("none", "very"),
        evaluate_every=2,
        model="layers=1,width=16,heads=2,head_size=8",
        large="layers=1,width=24,heads=3,head_size=8",
        data="seq_len=16,eval_batches=2",
        batch_size=2,
        warmup=2,
    )


def standing(plan: Plan) -> dict[str, Row]:
    """What the others are compared with."""
    return {DEFAULT: plan.own(DELAYED), **_rows(plan)}


def _rows(plan: Plan) -> dict[str, Row]:
    return {DELAYED: plan.own(DELAYED), SYNC: plan.sync(SYNC), NAIVE: plan.naive(NAIVE)}


def groups(plan: Plan) -> list[Group]:
    """All tables."""
    return [_headline(plan), _fixes(plan), _levels(plan), _slow(plan), _sizes(plan), _pairs(plan)]


def _group(name: str, title: str, note: str, rows: dict[str, Row], against: dict[str, str]) -> Group:
    return Group(name=name, title=title, note=note, rows=rows, against=against, timed=against, same_tokens=SAME_TOKENS)


def _headline(plan: Plan) -> Group:
    rows = _rows(plan)
    note = f"Synchronous training (DiLoCo), its outer step at every arrival (naive), and the paper's own, {DELAYED}."
    return _group("headline", "The headline", note, rows, dict.fromkeys(rows, SYNC))


def _fixes(plan: Plan) -> Group:
    rows = {
        "Polynomial": plan.naive("Polynomial", "algorithm.correction=Polynomial(power=0.5)"),
        "Polynomial, 10": plan.naive("Polynomial, 10", "algorithm.correction=Polynomial(power=0.5,threshold=10)"),
        "compensation": plan.naive("compensation", "algorithm.correction=DelayCompensation(strength=0.5)"),
        "buffer": plan.arriving("buffer", f"Buffered(rule={plan.nesterov},size={plan.islands})", weight="1.0"),
        "DN": plan.own("DN", "algorithm.pace=even", "algorithm.grace_s=0"),
        "DyLU": plan.naive("DyLU", "algorithm.pace=given", f"algorithm.grace_s={plan.window_s}"),
    }
    note = (
        "What the paper compares, each on top of naive: a discount by staleness, also with updates left out beyond a staleness of "
        "10, delay compensation, a buffer of as many arrivals as workers, and its own two parts: Delayed Nesterov with no "
        "pace (DN), and Dynamic Local Updates with the naive outer step (DyLU)."
    )
    return _group("fixes", "Remedies", note, rows, dict.fromkeys(rows, SYNC))


def _levels(plan: Plan) -> Group:
    rows: dict[str, Row] = {}
    against: dict[str, str] = {}
    for level in plan.levels[:-1]:
        setting = f"cluster.step_time_s={level}"
        makes = ((SYNC, plan.sync), (NAIVE, plan.naive), (DELAYED, plan.own))
        rows |= {_at(level, name): make(_at(level, name), setting) for name, make in makes}
        against |= dict.fromkeys((_at(level, name) for name, _ in makes), _at(level, SYNC))
    note = f"Step times of all levels have the same total speed; the headline is the last level, {plan.levels[-1]}."
    return _group("level", "How much the workers differ", note, rows, against)


def _slow(plan: Plan) -> Group:
    setting = f"cluster.link.bandwidth_mbit_per_s={plan.slow_mbit_per_s:g}"
    makes = ((SYNC, plan.sync), (DELAYED, plan.own))
    rows = {_at("slow lines", name): make(_at("slow lines", name), setting) for name, make in makes}
    note = (
        f"Of {plan.slow_mbit_per_s:g} Mbit/s; all other rows have {plan.mbit_per_s:g}. A worker waits for what it pulls and pushes."
    )
    return _group("slow", "Slower lines", note, rows, dict.fromkeys(rows, _at("slow lines", SYNC)))


def _sizes(plan: Plan) -> Group:
    setting = f"model=GPT({plan.large})"
    makes = ((SYNC, plan.sync), (NAIVE, plan.naive), (DELAYED, plan.own))
    rows = {_at("large", name): make(_at("large", name), setting) for name, make in makes}
    note = "A larger model, of the 60M preset's shape. Step times do not follow the size."
    return _group("size", "Model size", note, rows, dict.fromkeys(rows, _at("large", SYNC)))


def _pairs(plan: Plan) -> Group:
    inner = {"AdamW": (), "SGD": (f"optimizer=SGD(lr=Cosine(lr=1.0,warmup={plan.warmup},floor=0.1))",)}
    outer = {
        "SGD": ("SGD(lr=1.0)", "SGD(lr=1.0)", "1/k"),
        "Nesterov": (plan.nesterov, plan.nesterov, "1/k"),
        "Adam": ("Adam(lr=0.3,betas=[0.9,0.95],eps=0.1)", "Adam(lr=0.1,betas=[0.9,0.95],eps=0.1)", "1.0"),
    }
    rows: dict[str, Row] = {}
    against: dict[str, str] = {}
    for inside, settings in inner.items():
        for outside, (together, apart, weight) in outer.items():
            sync, arriving = pair(inside, outside)
            rows[sync] = plan.sync(sync, *settings, outer=together)
            rows[arriving] = plan.arriving(arriving, apart, *settings, weight=weight)
            against |= {sync: pair(inside, "Nesterov")[0], arriving: sync}
    note = (
        "Inner rule + outer rule; synchronous, and at every arrival with a weight of 1/k (Adam, which divides by the size of what "
        "it is given, has a smaller rate instead). The inner rule also trains the warm start."
    )
    return _group("pairs", "Pairs of inner and outer rule", note, rows, against)


def claims(plan: Plan) -> list[Claim]:
    """What the paper says, and what is asked of its own method."""
    within = f"{DELAYED} ends at most {CLOSE} above synchronous training"
    others = plan.levels[:-1]
    return [
        Claim(text=f"{within}.", terms=((1.0, DELAYED), (-1.0, SYNC)), below=CLOSE),
        higher("Naive is worse than synchronous training (+7.1 %).", NAIVE, SYNC),
        lower(f"{DELAYED} is better than naive.", DELAYED, NAIVE),
        lower("Delayed Nesterov alone mends a part of it.", "DN", NAIVE),
        lower("Dynamic Local Updates alone mend a part of it.", "DyLU", NAIVE),
        *(
            Claim(text=f"{within} at the level {level}.", terms=((1.0, _at(level, DELAYED)), (-1.0, _at(level, SYNC))), below=CLOSE)
            for level in others
        ),
        *(higher(f"Naive is worse at the level {level} (+7 %).", _at(level, NAIVE), _at(level, SYNC)) for level in others),
        alike("Equal workers do not mend naive (bound 1 %).", _at(others[0], NAIVE), NAIVE, 1.0),
        lower(f"{DELAYED} is better than a discount by staleness.", DELAYED, "Polynomial"),
        lower(f"{DELAYED} is better than delay compensation.", DELAYED, "compensation"),
        lower(f"{DELAYED} is better than a buffer.", DELAYED, "buffer"),
        *remedies(),
        *pairs(),
        unlike(lower(f"The larger model: {DELAYED} is better than naive.", _at("large", DELAYED), _at("large", NAIVE))),
        unlike(
            Claim(
                text=f"The larger model: {within}.", terms=((1.0, _at("large", DELAYED)), (-1.0, _at("large", SYNC))), below=CLOSE
            )
        ),
    ]


def _at(where: str, name: str) -> str:
    """A row's label at a level, or with another model."""
    return f"{where}, {name}"


def introduction(plan: Plan, default: Outcome) -> str:
    params = default.mean("params")
    size = f" of {params:,.0f} parameters" if params is not None else ""
    return (
        f"A decoder{size} on {plan.islands} workers of very different speeds: {plan.warm_start} steps of warm start by one, then "
        f"{plan.steps} per worker, {plan.steps * plan.islands} local updates in all, in rounds of {plan.inner_steps} of "
        f"the fastest. Rows of the headline have three seeds, all others one. The last column is the virtual time as a share of "
        f"synchronous training's on the same workers."
    )


def timed(plan: Plan, outcomes: Mapping[str, Outcome]) -> list[str]:
    """Whether the paper's own takes as little time as asked."""
    share = time_ratio(outcomes[DELAYED], outcomes[SYNC]) if {DELAYED, SYNC} <= outcomes.keys() else None
    if share is None:
        return []
    verdict = "holds here" if share <= SHARE else "does not hold here"
    return [f"**{verdict}**: {DELAYED} takes at most a third of synchronous training's virtual time. It takes {share:.3f} of it."]


EVIDENCE = Evidence(
    name="evidence_async",
    title="Asynchronous Local-SGD on one GPU and real text",
    about=__doc__ or "",
    plan=plan,
    groups=groups,
    standing=standing,
    called=DELAYED,
    headline=lambda plan: (DELAYED, SYNC, NAIVE),
    steady=lambda plan: (DELAYED, SYNC),
    introduction=introduction,
    reading=f"This is {DELAYED}; a row adds settings, or has an algorithm of its own:",
    claims=claims,
    plot=lambda plan, outcomes, path: plot_curves((SYNC, NAIVE, DELAYED), outcomes, path),
    share="of sync's",
    verdicts=timed,
)


def main(arguments: Sequence[str] | None = None) -> None:
    EVIDENCE.main(arguments)


if __name__ == "__main__":
    script(main)
