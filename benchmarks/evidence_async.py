"""Asynchronous Local-SGD's claims on one GPU and real text: no worker waits for the slowest.

    python benchmarks/evidence_async.py --text prepared/wiki --processes 6            about 15 minutes of one H200
    python benchmarks/evidence_async.py --text prepared/wiki --only level             one table
    python benchmarks/evidence_async.py --text prepared/small --quick                 smoke test on the CPU

See `evidence.py` for the text and for continuing a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ablations import DEFAULT, Group, mild
from async_rows import ASYNC, DDP, DELAYED, DILOCO, NAIVE, SYNC, pair
from cells import Row
from evidence import Evidence, OnGpu, plot_curves
from evidence_async_report import at, claims, introduction, timed
from record import script

SAME_TOKENS = 0.015
"""A hub stops at the arrival that reaches the number of local updates, which may be a round of all workers late."""


@dataclass(frozen=True, kw_only=True)
class Plan(OnGpu):
    """The workload and the values of the rows."""

    warm_start: int = 1000
    inner_steps: int = 50
    islands: int = 4
    evaluate_every: int = 250
    mbit_per_s: float = 1000
    levels: tuple[str, ...] = ("none", "slight", "moderate", "very")  # of heterogeneity; other rows have the last
    nesterov: str = "Nesterov(lr=0.7,momentum=0.9)"  # DiLoCo's outer rule, and naive's at every arrival
    delayed: str = "DelayedNesterov(lr=0.7,momentum=0.9,period=4)"
    window_s: float = 3.0  # the hub's grace window with Dynamic Local Updates
    slow_mbit_per_s: float = 100
    milder: tuple[float, float] = (0.9, 0.7)  # learning rate and momentum of outer rules for few rounds
    often: int = 30  # steps of a synchronous round, for about as many rounds as with Dynamic Local Updates
    naive_rates: tuple[float, ...] = (0.3, 0.1)  # further outer rates of naive, from the paper's grid
    large_lr: float = 0.0006  # of the larger model: lower, as its width is larger

    @property
    def batch(self) -> str:
        """The label of the larger batch."""
        return f"{self.islands}x batch"

    @property
    def large_at(self) -> str:
        """The label prefix of the larger model at its own rate."""
        return f"large, lr {self.large_lr:g}"

    @property
    def as_often(self) -> str:
        """The label of synchronous training with shorter rounds."""
        return f"{SYNC}, H={self.often}"

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
        """An outer rule at every arrival, with equal steps and no grace window."""
        return self.row(ASYNC, name, f"AsyncLocalSGD(inner_steps={self.inner_steps},outer={outer},weight={weight})", *settings)

    @property
    def buffer(self) -> str:
        """DiLoCo's outer rule on as many arrivals as workers."""
        return f"Buffered(rule={self.nesterov},size={self.islands})"

    def naive(self, name: str, *settings: str) -> Row:
        return self.arriving(name, self.nesterov, *settings)


def plan(quick: bool) -> Plan:
    if not quick:
        return Plan()
    return Plan(
        steps=6,
        warm_start=2,
        inner_steps=2,
        often=1,
        naive_rates=(0.1,),
        levels=("none", "very"),
        evaluate_every=2,
        model="layers=1,width=16,heads=2,head_size=8",
        large="layers=1,width=24,heads=3,head_size=8",
        seq_len=16,
        eval_batches=2,
        batch_size=2,
        warmup=2,
    )


def standing(plan: Plan) -> dict[str, Row]:
    """The rows that others are compared with."""
    return {DEFAULT: plan.own(DELAYED), **_rows(plan)}


def _rows(plan: Plan) -> dict[str, Row]:
    return {DELAYED: plan.own(DELAYED), SYNC: plan.sync(SYNC), NAIVE: plan.naive(NAIVE)}


def groups(plan: Plan) -> list[Group]:
    """All tables."""
    return [_headline(plan), _fair(plan), _fixes(plan), _levels(plan), _slow(plan), _sizes(plan), _pairs(plan)]


def _group(name: str, title: str, note: str, rows: dict[str, Row], against: dict[str, str]) -> Group:
    return Group(name=name, title=title, note=note, rows=rows, against=against, timed=against, same_tokens=SAME_TOKENS)


def _headline(plan: Plan) -> Group:
    rows = _rows(plan)
    note = f"Synchronous training (DiLoCo), its outer step at every arrival (naive), and the paper's method, {DELAYED}."
    return _group("headline", "The headline", note, rows, dict.fromkeys(rows, SYNC))


def _fair(plan: Plan) -> Group:
    rate, momentum = plan.milder
    milder = (f"algorithm.outer.lr={rate:g}", f"algorithm.outer.momentum={momentum:g}")
    dynamic = ("algorithm.pace=given", f"algorithm.grace_s={plan.window_s}")
    rows = {
        plan.as_often: plan.sync(plan.as_often, f"algorithm.inner_steps={plan.often}"),
        **{mild(name): make(mild(name), *milder) for name, make in ((SYNC, plan.sync), (DELAYED, plan.own), (NAIVE, plan.naive))},
        f"{DELAYED}, no window": plan.own(f"{DELAYED}, no window", "algorithm.grace_s=0"),
        "buffer+DyLU+window": plan.arriving("buffer+DyLU+window", plan.buffer, *dynamic, weight="1.0"),
        "outer SGD+DyLU+window": plan.arriving("outer SGD+DyLU+window", "SGD(lr=1.0)", *dynamic),
        **{f"naive, lr {rate:g}": plan.naive(f"naive, lr {rate:g}", f"algorithm.outer.lr={rate:g}") for rate in plan.naive_rates},
        plan.batch: plan.row(DDP, plan.batch, "DDP()"),
    }
    note = (
        f"{DELAYED} exchanges more often than {SYNC}, since slow workers have shorter rounds (pace), and its hub has a grace "
        f"window of {plan.window_s:g} s; {plan.as_often} exchanges about as often. Further rows: the three rows of the headline "
        f"with a milder outer rule ({rate:g}, momentum {momentum:g}), other outer rules with the same pace and window, {DELAYED} "
        f"without the window, naive with lower outer rates, and {plan.batch}: gradients at every step, at the pace of the slowest "
        f"worker."
    )
    against = dict.fromkeys(rows, SYNC) | dict.fromkeys((mild(DELAYED), mild(NAIVE)), mild(SYNC))
    return _group("fair", "Contributions of pace, window and outer rule", note, rows, against)


def _fixes(plan: Plan) -> Group:
    rows = {
        "Polynomial": plan.naive("Polynomial", "algorithm.correction=Polynomial(power=0.5)"),
        "Polynomial, 10": plan.naive("Polynomial, 10", "algorithm.correction=Polynomial(power=0.5,threshold=10)"),
        "compensation": plan.naive("compensation", "algorithm.correction=DelayCompensation(strength=0.5)"),
        "buffer": plan.arriving("buffer", plan.buffer, weight="1.0"),
        "DN": plan.own("DN", "algorithm.pace=even", "algorithm.grace_s=0"),
        "DyLU": plan.naive("DyLU", "algorithm.pace=given", f"algorithm.grace_s={plan.window_s}"),
    }
    note = (
        "The remedies that the paper compares, each on top of naive: a discount by staleness, also without updates beyond a "
        "staleness of 10, delay compensation, a buffer of as many arrivals as workers, and the two parts of the paper's method: "
        "Delayed Nesterov with equal steps (DN), and Dynamic Local Updates with the naive outer step (DyLU)."
    )
    return _group("fixes", "Remedies", note, rows, dict.fromkeys(rows, SYNC))


def _levels(plan: Plan) -> Group:
    rows: dict[str, Row] = {}
    against: dict[str, str] = {}
    for level in plan.levels[:-1]:
        setting = f"cluster.step_time_s={level}"
        makes = ((SYNC, plan.sync), (NAIVE, plan.naive), (DELAYED, plan.own))
        rows |= {at(level, name): make(at(level, name), setting) for name, make in makes}
        against |= dict.fromkeys((at(level, name) for name, _ in makes), at(level, SYNC))
    note = f"All levels have the same total speed. The headline is at the last level, {plan.levels[-1]}."
    return _group("level", "Heterogeneity of the workers", note, rows, against)


def _slow(plan: Plan) -> Group:
    setting = f"cluster.link.bandwidth_mbit_per_s={plan.slow_mbit_per_s:g}"
    makes = ((SYNC, plan.sync), (DELAYED, plan.own))
    rows = {at("slow links", name): make(at("slow links", name), setting) for name, make in makes}
    note = f"{plan.slow_mbit_per_s:g} Mbit/s; all other rows have {plan.mbit_per_s:g}. A worker waits while it pulls and pushes."
    return _group("slow", "Slower links", note, rows, dict.fromkeys(rows, at("slow links", SYNC)))


def _sizes(plan: Plan) -> Group:
    setting = f"model=GPT({plan.large})"
    slower = (setting, f"optimizer.lr.lr={plan.large_lr:g}", f"optimizer.lr.floor={plan.floor * plan.large_lr:g}")
    makes = ((SYNC, plan.sync), (NAIVE, plan.naive), (DELAYED, plan.own))
    rows: dict[str, Row] = {}
    against: dict[str, str] = {}
    for size, settings in (("large", (setting,)), (plan.large_at, slower)):
        own = {at(size, name): make(at(size, name), *settings) for name, make in makes}
        rows, against = rows | own, against | dict.fromkeys(own, at(size, SYNC))
    note = (
        f"A larger model, of the 60M preset's shape, at the rate of all other rows ({plan.lr:g}), and at {plan.large_lr:g}: lower, "
        f"as its width is larger. Step times do not depend on the size."
    )
    return _group("size", "Model size", note, rows, against)


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
        "Inner rule + outer rule; synchronous, and at every arrival with a weight of 1/k (Adam, which normalizes its "
        "input, has a smaller rate instead). The inner rule also trains the warm start."
    )
    return _group("pairs", "Pairs of inner and outer rule", note, rows, against)


EVIDENCE = Evidence(
    name="evidence_async",
    title="Asynchronous Local-SGD on one GPU and real text",
    about=__doc__ or "",
    plan=plan,
    groups=groups,
    standing=standing,
    default=DELAYED,
    headline=lambda plan: (DELAYED, SYNC, NAIVE, mild(DELAYED), mild(SYNC)),
    introduction=introduction,
    reading=f"The command runs {DELAYED}. A row adds settings, or has another algorithm:",
    claims=claims,
    plot=lambda plan, outcomes, path: plot_curves((SYNC, NAIVE, DELAYED), outcomes, path),
    share="of sync's",
    verdicts=timed,
)


def main(arguments: Sequence[str] | None = None) -> None:
    EVIDENCE.main(arguments)


if __name__ == "__main__":
    script(main)
