"""The rows of asynchronous Local-SGD's ablations: a small workload on workers of unequal speed.

A row is `atoll run RECIPE` with `Plan.base` and settings of its own. All rows with the same number of workers have the same number
of local updates.
"""

from __future__ import annotations

from dataclasses import dataclass

from ablations import DEFAULT, Group
from cells import Row
from workload import Workload

DDP, DILOCO, ASYNC = "demo-ddp", "demo-diloco", "demo-async"
SYNC, NAIVE, DELAYED, ONE = "sync", "naive", "DN+DyLU", "one worker"
NESTEROV = "Nesterov(lr=0.9,momentum=0.7)"
SAME_TOKENS = 0.015
"""A hub stops at the arrival that reaches the number of local updates, here up to 19 of 1,740 late. Verdicts ignore that."""
INNER = {
    "AdamW": "",
    # The peak, of 0.1, 0.3, 1, 3 and 10, at which synchronous training ends lowest on seed 0.
    "SGD": "optimizer=SGD(lr=Cosine(lr=1.0,warmup={warmup},floor=0.1))",
}
"""Inner rules of the pairs. All other rows have AdamW."""
OUTER = {
    "SGD": ("SGD(lr=1.0)", "SGD(lr=1.0)"),
    "Momentum": ("Momentum(lr=0.6,momentum=0.7)", "Momentum(lr=0.6,momentum=0.7)"),
    "Nesterov": (NESTEROV, NESTEROV),
    "Adam": ("Adam(lr=0.3,betas=[0.9,0.95],eps=0.1)", "Adam(lr=0.1,betas=[0.9,0.95],eps=0.1)"),
}
"""Outer rules of the pairs: synchronous, and at every arrival."""


@dataclass(frozen=True, kw_only=True)
class Plan(Workload):
    """The workload and the values of the rows."""

    levels: tuple[str, ...] = ("none", "slight", "moderate", "very")  # of heterogeneity; other rows have the last
    counts: tuple[int, ...] = (4, 8, 16)  # workers
    periods: tuple[int, ...] = (1, 2, 4, 8, 16)  # arrivals per period of Delayed Nesterov
    activations: tuple[float, ...] = (0, 0.05, 0.1, 0.2, 0.25)  # shares of the momentum that every arrival applies
    graces_s: tuple[float, ...] = (0, 0.5, 2)  # the hub's grace windows
    lengths: tuple[int, ...] = (10, 20, 50)  # inner steps of the fastest worker's rounds
    weights: tuple[str, ...] = ("0.125", "1/k", "0.5", "1.0")  # of each delta at the naive hub
    toy: tuple[str, ...] = ("model.hidden=128",)  # settings of the toy's rows

    def base(self, recipe: str) -> tuple[str, ...]:
        """The settings that the rows of a recipe share."""
        delayed = f"DelayedNesterov(lr=0.9,momentum=0.7,period={self.islands})"
        algorithm = {
            DDP: "DDP()",
            DILOCO: f"DiLoCo(inner_steps={self.inner_steps},outer={NESTEROV})",
            ASYNC: f"AsyncLocalSGD(inner_steps={self.inner_steps},outer={delayed},pace=given,grace_s=2.0)",
        }[recipe]
        return self.settings(algorithm, step_time_s=self.levels[-1])

    def sync(self, name: str, *settings: str) -> Row:
        """DiLoCo."""
        return Row(recipe=DILOCO, base=self.base(DILOCO), settings=settings, name=name)

    def delayed(self, name: str, *settings: str) -> Row:
        """Delayed Nesterov with Dynamic Local Updates."""
        return Row(recipe=ASYNC, base=self.base(ASYNC), settings=settings, name=name)

    def arriving(self, name: str, outer: str, *settings: str, weight: str = "1/k") -> Row:
        """An outer rule at every arrival, with equal steps and no grace window."""
        algorithm = f"algorithm=AsyncLocalSGD(inner_steps={self.inner_steps},weight={weight})"
        return self.delayed(name, algorithm, f"algorithm.outer={outer}", *settings)

    def naive(self, name: str, *settings: str) -> Row:
        """DiLoCo's outer step at every arrival."""
        return self.arriving(name, NESTEROV, *settings)

    def large_batch(self, name: str, times: int, *settings: str) -> Row:
        """One worker with this many times the batch."""
        own = (*settings, "cluster.islands=1", f"algorithm.accumulation={times}")
        return Row(recipe=DDP, base=self.base(DDP), settings=own, name=name)


QUICK = Plan(
    steps=6,
    warm_start=2,
    inner_steps=2,
    levels=("none", "very"),
    counts=(4, 8),
    periods=(1, 4),
    activations=(0, 0.1),
    graces_s=(0, 2),
    lengths=(1, 2),
    weights=("1/k", "0.5"),
    toy=("model.hidden=8", "train.steps=40"),
    model="layers=1,width=8,heads=1,head_size=8",
    large="layers=1,width=16,heads=2,head_size=8",
    data="seq_len=16,limit_bytes=100000,eval_batches=2",
    batch_size=2,
    warmup=2,
)
"""A smoke test of less than a minute; its figures mean nothing."""


def groups(plan: Plan) -> list[Group]:
    """All ablations."""
    parts = (_levels, _fixes, _counts, _sizes, _pairs, _periods, _activations, _graces, _lengths, _weights, _shards, _toy)
    return [part(plan) for part in parts]


def standing(plan: Plan) -> dict[str, Row]:
    """The rows that others are compared with."""
    return {DEFAULT: plan.delayed(DEFAULT), SYNC: plan.sync(SYNC)}


def _group(
    name: str, title: str, note: str, rows: dict[str, Row], against: dict[str, str], timed: dict[str, str] | None = None
) -> Group:
    """A group. Virtual times are over those of the rows it is compared with, unless `timed` names others."""
    timed = against if timed is None else timed
    return Group(name=name, title=title, note=note, rows=rows, against=against, timed=timed, same_tokens=SAME_TOKENS)


def _methods(plan: Plan, where: str, setting: str) -> dict[str, Row]:
    """The three methods with one more setting; `where` begins their labels."""
    makes = {SYNC: plan.sync, NAIVE: plan.naive, DELAYED: plan.delayed}
    return {f"{where}, {method}": make(f"{where}, {method}", setting) for method, make in makes.items()}


def _levels(plan: Plan) -> Group:
    rows: dict[str, Row] = {}
    against: dict[str, str] = {}
    for level in plan.levels:
        mine = _methods(plan, level, f"cluster.step_time_s={level}")
        rows |= mine
        against |= dict.fromkeys(mine, f"{level}, {SYNC}")
    batch = f"{plan.islands}x batch"
    rows[batch], rows[ONE] = plan.large_batch(batch, plan.islands), plan.large_batch(ONE, 1)
    return _group(
        "level",
        "Heterogeneity of the workers",
        f"All levels have the same total speed. Synchronous training waits for the slowest worker, and ends at the same loss at "
        f"every level. Naive applies DiLoCo's outer step at every arrival, weighted 1/k. {batch}: one worker, the fastest, with "
        f"{plan.islands} times the batch. One worker: the same with the batch of all rows.",
        rows,
        against | {batch: SYNC, ONE: SYNC},
    )


def _fixes(plan: Plan) -> Group:
    size, own = plan.islands, ("algorithm.pace=given", "algorithm.grace_s=2.0")
    buffer = f"Buffered(rule={NESTEROV},size={size})"
    rows = {
        SYNC: plan.sync(SYNC),
        NAIVE: plan.naive(NAIVE),
        "Polynomial": plan.naive("Polynomial", "algorithm.correction=Polynomial(power=0.5)"),
        "Polynomial, 10": plan.naive("Polynomial, 10", "algorithm.correction=Polynomial(power=0.5,threshold=10)"),
        "compensation": plan.naive("compensation", "algorithm.correction=DelayCompensation(strength=0.5)"),
        "buffer": plan.arriving("buffer", buffer, weight="1.0"),
        "outer SGD": plan.arriving("outer SGD", OUTER["SGD"][1]),
        "DN": plan.delayed("DN", "algorithm.pace=even", "algorithm.grace_s=0"),
        "DN+DyLU, no window": plan.delayed("DN+DyLU, no window", "algorithm.grace_s=0"),
        f"{NAIVE}+DyLU+window": plan.naive(f"{NAIVE}+DyLU+window", *own),
        "buffer+DyLU+window": plan.arriving("buffer+DyLU+window", buffer, *own, weight="1.0"),
        "outer SGD+DyLU+window": plan.arriving("outer SGD+DyLU+window", OUTER["SGD"][1], *own),
        "DN+window": plan.delayed("DN+window", "algorithm.pace=even"),
        DELAYED: plan.delayed(DELAYED),
        f"{DELAYED}, measured": plan.delayed(f"{DELAYED}, measured", "algorithm.pace=measured"),
    }
    return _group(
        "fixes",
        "Remedies, with and without the window",
        "The remedies that the paper compares, each on top of naive: a discount by staleness, also without updates beyond a "
        "staleness of 10, delay compensation, and a buffer (one step on the mean of k arrivals); and outer SGD, which has no "
        "momentum. Then the paper's method: Delayed Nesterov (DN) with Dynamic Local Updates (DyLU). Rows up to there have no "
        f"grace window. Rows with a window, and {DELAYED} in all tables, have one of 2 s, in which with DyLU all workers arrive. "
        "The lower rows show the effect of window and DyLU on each rule.",
        rows,
        dict.fromkeys(rows, SYNC),
    )


def _counts(plan: Plan) -> Group:
    rows: dict[str, Row] = {}
    against: dict[str, str] = {}
    for count in plan.counts:
        setting, label = f"cluster.islands={count}", f"k={count}"
        mine = _methods(plan, label, setting) | {
            f"{label}, {DELAYED}": plan.delayed(f"{label}, {DELAYED}", setting, f"algorithm.outer.period={count}"),
            f"{label}, {count}x batch": plan.large_batch(f"{label}, {count}x batch", count),
        }
        rows |= mine
        against |= dict.fromkeys(mine, f"{label}, {SYNC}")
    note = "The same steps per worker, so tokens grow with k. The four step times repeat, and the period is k."
    return _group("k", "Workers (k)", note, rows, against)


def _sizes(plan: Plan) -> Group:
    rows: dict[str, Row] = {}
    against: dict[str, str] = {}
    for name, model in (("small", plan.model), ("large", plan.large)):
        setting = f"model=GPT({model})"
        mine = _methods(plan, name, setting) | {
            f"{name}, batch": plan.large_batch(f"{name}, batch", plan.islands, setting),
        }
        rows |= mine
        against |= dict.fromkeys(mine, f"{name}, {SYNC}")
    return _group(
        "size", "Model size", "Small is the model of all other tables. Step times do not depend on the size.", rows, against
    )


def _pairs(plan: Plan) -> Group:
    rows: dict[str, Row] = {}
    against: dict[str, str] = {}
    timed: dict[str, str] = {}
    for inner, setting in INNER.items():
        more = (setting.format(warmup=plan.warmup),) if setting else ()
        for outer, (together, apart) in OUTER.items():
            sync, arriving = pair(inner, outer)
            weight = "1.0" if outer == "Adam" else "1/k"
            rows[sync] = plan.sync(sync, f"algorithm.outer={together}", *more)
            rows[arriving] = plan.arriving(arriving, apart, *more, weight=weight)
            against |= {sync: pair(inner, "Nesterov")[0], arriving: sync}
            timed |= {sync: sync, arriving: sync}
    return _group(
        "pairs",
        "Pairs of inner and outer rule",
        "Inner rule + outer rule; synchronous, and at every arrival with a weight of 1/k. Adam normalizes its input, so a weight "
        "would have little effect: it has a smaller rate instead. An asynchronous row is compared with its synchronous one, and "
        "that with Nesterov as the outer rule. The inner rule also trains the warm start, so rows with SGD as the inner rule start "
        "from other weights.",
        rows,
        against,
        timed,
    )


def pair(inner: str, outer: str) -> tuple[str, str]:
    """The labels of a pair: synchronous, and at every arrival.

    >>> pair("AdamW", "SGD")
    ('AdamW+SGD, sync', 'AdamW+SGD, async')
    """
    return f"{inner}+{outer}, sync", f"{inner}+{outer}, async"


def _periods(plan: Plan) -> Group:
    rows = {f"N={period}": plan.delayed(f"N={period}", f"algorithm.outer.period={period}") for period in plan.periods}
    note = (
        f"Arrivals between two updates of the momentum; k is {plan.islands}. The rate is that of a whole period: N=1 takes a full "
        f"step at every arrival, N=16 a sixteenth of one."
    )
    return _group("N", "The period of Delayed Nesterov (N)", note, rows, dict.fromkeys(rows, DEFAULT), dict.fromkeys(rows, SYNC))


def _activations(plan: Plan) -> Group:
    rows = {f"c={share}": plan.delayed(f"c={share}", f"algorithm.outer.activation={share}") for share in plan.activations}
    note = f"The share of the momentum that every arrival but the last applies, at N={plan.islands}; 1/N is an equal share."
    return _group(
        "c", "The activation of Delayed Nesterov (c)", note, rows, dict.fromkeys(rows, DEFAULT), dict.fromkeys(rows, SYNC)
    )


def _graces(plan: Plan) -> Group:
    rows = {f"grace {grace_s} s": plan.delayed(f"grace {grace_s} s", f"algorithm.grace_s={grace_s}") for grace_s in plan.graces_s}
    against = dict.fromkeys(rows, DEFAULT)
    buffered = f"Buffered(rule={NESTEROV},size={plan.islands})"
    rows["buffer, grace inf"] = plan.arriving("buffer, grace inf", buffered, "algorithm.grace_s=inf", weight="1.0")
    note = (
        "How long the hub waits after an arrival, to dispatch workers together. A buffer of all workers with an infinite window is "
        "synchronous training over a hub instead of a ring, and is compared with it."
    )
    return _group("grace", "The grace window", note, rows, against | {"buffer, grace inf": SYNC}, dict.fromkeys(rows, SYNC))


def _lengths(plan: Plan) -> Group:
    rows: dict[str, Row] = {}
    against: dict[str, str] = {}
    for steps in plan.lengths:
        label, setting = f"H={steps}", f"algorithm.inner_steps={steps}"
        mine = {
            f"{label}, {SYNC}": plan.sync(f"{label}, {SYNC}", setting),
            f"{label}, {DELAYED}": plan.delayed(f"{label}, {DELAYED}", setting),
        }
        rows |= mine
        against |= dict.fromkeys(mine, f"{label}, {SYNC}")
    return _group("H", "Inner steps per round (H)", "With Dynamic Local Updates, those of the fastest worker.", rows, against)


def _weights(plan: Plan) -> Group:
    rows = {f"weight {weight}": plan.arriving(f"weight {weight}", NESTEROV, weight=weight) for weight in plan.weights}
    note = f"By which the naive hub multiplies each delta; 1/k is {1 / plan.islands:g}. Compared with synchronous training."
    return _group("weight", "Weights of deltas", note, rows, dict.fromkeys(rows, SYNC))


def _shards(plan: Plan) -> Group:
    half = plan.islands // 2
    rows = {f"{half} shards": plan.delayed(f"{half} shards", f"data.shards={half}")}
    note = f"{plan.islands} workers read {half} shards of the same text; the default has one for each worker."
    return _group("shards", "Fewer shards than workers", note, rows, dict.fromkeys(rows, DEFAULT), dict.fromkeys(rows, SYNC))


TOY_SYNC, TOY_ASYNC, TOY_SGD = "toy, sync", "toy, async", "toy, async, SGD"


def _toy(plan: Plan) -> Group:
    sgd = "algorithm.outer=SGD(lr=0.7)"
    rows = {
        TOY_SYNC: Row(recipe="toy-sync", settings=plan.toy, name=TOY_SYNC),
        TOY_ASYNC: Row(recipe="toy-async", settings=plan.toy, name=TOY_ASYNC),
        TOY_SGD: Row(recipe="toy-async", settings=(*plan.toy, sgd), name=TOY_SGD),
    }
    note = (
        "The recipes of the authors' notebook, with a smaller perceptron: heavy ball on the mean of the workers, heavy ball at "
        "every arrival, and SGD at every arrival. Another model on other data, so the ratio of tokens to the default's means "
        "nothing."
    )
    return _group("toy", "The authors' toy", note, rows, {TOY_ASYNC: TOY_SYNC, TOY_SGD: TOY_SYNC})
