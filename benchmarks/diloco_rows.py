"""The rows of DiLoCo's ablations: a small workload on equal islands. A row is `atoll run RECIPE` with `Plan.base` and settings of "
"its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ablations import DEFAULT, Group
from cells import Row
from workload import Workload

DILOCO, DDP = "demo-diloco", "demo-ddp"
ALL_DELTAS = "all deltas"


class MakesRows(Protocol):
    """A plan that makes rows of DiLoCo."""

    def row(self, name: str, *settings: str) -> Row: ...


K_MEANS = ("data.partition=KMeans(fit_examples=2000)", "algorithm.weighting=examples")
"""Shards of different text, weighted by their sizes."""


@dataclass(frozen=True, kw_only=True)
class Plan(Workload):
    """The workload and the values of the rows.

    `steps` is a multiple of all `lengths`, and of a round per island, so that all pools have whole rounds. Rows that change the
    warm start keep its sum with `steps`. The baselines have as many times the batch or the updates as there are islands.
    """

    lengths: tuple[int, ...] = (5, 10, 20, 50, 100)  # inner steps per round
    counts: tuple[int, ...] = (1, 2, 4, 8)  # islands
    warm_starts: tuple[int, ...] = (0, 140, 260)  # steps
    small: str = "layers=1,width=32,heads=2,head_size=16"

    def base(self, recipe: str) -> tuple[str, ...]:
        """The settings that the rows of a recipe share."""
        algorithm = f"DiLoCo(inner_steps={self.inner_steps},outer=Nesterov(lr=0.9,momentum=0.7))" if recipe == DILOCO else "DDP()"
        return self.settings(algorithm, step_time_s="[0.1]")

    def row(self, name: str, *settings: str, recipe: str = DILOCO) -> Row:
        return Row(recipe=recipe, base=self.base(recipe), settings=settings, name=name)


QUICK = Plan(
    steps=8,
    warm_start=4,
    inner_steps=2,
    lengths=(1, 2, 4),
    counts=(1, 2, 4),
    warm_starts=(0, 4, 6),
    small="layers=1,width=8,heads=1,head_size=8",
    model="layers=1,width=16,heads=2,head_size=8",
    large="layers=1,width=24,heads=3,head_size=8",
    data="seq_len=16,limit_bytes=100000,eval_batches=2",
    batch_size=2,
    warmup=2,
)
"""A smoke test of less than a minute; its figures mean nothing."""


def groups(plan: Plan) -> list[Group]:
    """All ablations."""
    parts = (
        _lengths,
        _counts,
        _partitions,
        _outer_rules,
        _decay,
        _drops,
        _quorums,
        pools,
        pruning,
        _warm_starts,
        _alone,
        _sizes,
        _baselines,
    )
    return [part(plan) for part in parts]


def default_row(plan: Plan) -> Row:
    """The row that others are compared with."""
    return plan.row(DEFAULT)


def _lengths(plan: Plan) -> Group:
    return Group(
        name="H",
        title="Inner steps per round (H)",
        note="The same steps and tokens; fewer bytes from row to row.",
        rows={f"H={steps}": plan.row(f"H={steps}", f"algorithm.inner_steps={steps}") for steps in plan.lengths},
    )


def _counts(plan: Plan) -> Group:
    return Group(
        name="k",
        title="Islands (k)",
        note="The same steps per island, so tokens grow with k. k-means: shards of different text, weighted by examples.",
        rows={f"k={count}": plan.row(f"k={count}", f"cluster.islands={count}") for count in plan.counts}
        | {
            f"k={count}, k-means": plan.row(f"k={count}, k-means", f"cluster.islands={count}", *K_MEANS)
            for count in plan.counts[1:]
        },
    )


def _partitions(plan: Plan) -> Group:
    partitions = {"domains": "ByDomain()", "k-means": "KMeans(fit_examples=2000)", "Dirichlet": "Dirichlet(alpha=0.3)"}
    rows = {"IID": plan.row("IID", "data.partition=IID()")}
    for name, partition in partitions.items():
        for weighting in ("uniform", "examples"):
            label = f"{name}, {weighting}"
            rows[label] = plan.row(label, f"data.partition={partition}", f"algorithm.weighting={weighting}")
    return Group(
        name="partition",
        title="Equal and unequal shards",
        note="All deltas have the same weight, or each has the number of examples in its shard. Random shards (IID) have equal "
        "sizes, so both are the same.",
        rows=rows,
    )


def _outer_rules(plan: Plan) -> Group:
    rules = {
        "SGD 1.0": "SGD(lr=1.0)",
        "SGD 0.7": "SGD(lr=0.7)",
        "Momentum 0.3, 0.9": "Momentum(lr=0.3,momentum=0.9)",
        "Momentum 0.6, 0.7": "Momentum(lr=0.6,momentum=0.7)",
        "Nesterov 0.7, 0.9": "Nesterov(lr=0.7,momentum=0.9)",
        "Nesterov 0.9, 0.7": "Nesterov(lr=0.9,momentum=0.7)",
        "Adam 0.3": "Adam(lr=0.3,betas=[0.9,0.95],eps=0.1)",
    }
    return Group(
        name="outer",
        title="The outer rule",
        note="Learning rate, then momentum. SGD with a rate of 1 is Federated Averaging. The paper has Nesterov with 0.7 and 0.9 "
        "for 128 rounds; in few rounds a momentum of 0.9 is still building up when the run ends.",
        rows={name: plan.row(name, f"algorithm.outer={rule}") for name, rule in rules.items()},
    )


def _decay(plan: Plan) -> Group:
    decayed = f"algorithm.outer.lr=Cosine(lr=0.9,steps={plan.steps // plan.inner_steps})"
    return Group(
        name="decay",
        title="The outer rate over the run",
        note="Constant, or down to 0 by a cosine over all rounds.",
        rows={DEFAULT: default_row(plan), "outer cosine": plan.row("outer cosine", decayed)},
    )


def _drops(plan: Plan) -> Group:
    rows = {f"drop {p}": plan.row(f"drop {p}", f"cluster.drop_probability={p}") for p in (0, 0.1, 0.3, 0.5)}
    rows["drop 0.5, agreed"] = plan.row("drop 0.5, agreed", "cluster.drop_probability=0.5", "algorithm.missed=agreed")
    return Group(
        name="drop",
        title="Lost deltas",
        note="In each round each island's delta is lost with this probability. The island then continues from its own weights. Its "
        "next delta is relative to the global weights, which it receives first, or (agreed) to the weights of its last exchange. "
        "Tokens are those whose updates were delivered.",
        rows=rows,
    )


def _quorums(plan: Plan) -> Group:
    times_s = ",".join(f"{0.1 * time:g}" for time in (1, 1.5, 2, 4))
    settings: dict[str, tuple[str, ...]] = {ALL_DELTAS: ()}
    for quorum in (3, 2):
        for late in ("carried", "dropped"):
            settings[f"quorum {quorum}, {late}"] = (f"algorithm.quorum={quorum}", f"algorithm.late={late}")
    settings["quorum 2, carried, grace 1.5 s"] = (*settings["quorum 2, carried"], "algorithm.grace_s=1.5")
    settings["quorum 3, carried, twice the rounds"] = (*settings["quorum 3, carried"], f"train.steps={2 * plan.steps}")
    rows = {label: plan.row(label, f"cluster.step_time_s=[{times_s}]", *more) for label, more in settings.items()}
    others = dict.fromkeys([label for label in rows if label != ALL_DELTAS], ALL_DELTAS)
    return Group(
        name="quorum",
        title="A quorum on unequal islands",
        note=f"Four islands that need 0.1, 0.15, 0.2 and 0.4 s for a step. A round of {plan.inner_steps} steps ends when as many "
        f"deltas as the quorum are in, and the grace is over. A late delta is carried into the round that is open then, or "
        f"dropped. Late islands take part in fewer rounds, so at equal rounds the rows with a quorum train on fewer tokens.",
        rows=rows,
        against=others,
        timed=others,
    )


def pools(plan: MakesRows, ramp: Sequence[int] | None = None) -> Group:
    """`ramp`: islands over equal parts of the run, where one part per number of islands would not have whole rounds."""
    shapes = {"1 all along": "[1]", "all along": "constant"}
    shapes |= {name.replace("_", " "): name for name in ("doubling", "halving", "ramp_up", "ramp_down")}
    if ramp is not None:
        shapes |= {"ramp up": _listed(ramp), "ramp down": _listed(ramp[::-1])}
    return Group(
        name="pool",
        title="Changing numbers of islands",
        note="Tokens follow the number of islands. Doubling and halving train on the same tokens, and so do both ramps.",
        rows={f"pool: {name}": plan.row(f"pool: {name}", f"cluster.pool={pool}") for name, pool in shapes.items()},
    )


def _listed(counts: Sequence[int]) -> str:
    return f"[{','.join(map(str, counts))}]"


def pruning(plan: MakesRows) -> Group:
    return Group(
        name="pruning",
        title="Pruned deltas",
        note="Per neuron; values against the majority sign are pruned first. Bytes are counted without pruning.",
        rows={f"pruned {p}": plan.row(f"pruned {p}", f"algorithm.pruned={p}") for p in (0, 0.25, 0.5, 0.75)},
    )


def _warm_starts(plan: Plan) -> Group:
    total = plan.steps + plan.warm_start
    return Group(
        name="warm",
        title="Length of the warm start",
        note=f"{total} steps in total: one island during the warm start, all islands after it, so a longer warm start has fewer "
        f"tokens.",
        rows={
            f"warm {steps}": plan.row(f"warm {steps}", f"train.warm_start_steps={steps}", f"train.steps={total - steps}")
            for steps in plan.warm_starts
        },
    )


def _alone(plan: Plan) -> Group:
    return Group(
        name="alone",
        title="One island, with and without an outer step",
        note="The same tokens and no network: the rows differ only by the outer step on the island's own delta.",
        rows={"k=1": plan.row("k=1", "cluster.islands=1"), "one worker": _one_worker(plan)},
        against={"k=1": "one worker"},
    )


def _sizes(plan: Plan) -> Group:
    rows, against = {}, {}
    for name, model in (("small", plan.small), ("medium", plan.model), ("large", plan.large)):
        alone, together = f"{name}, one worker", f"{name}, DiLoCo"
        rows[alone] = _one_worker(plan, f"model=GPT({model})")
        rows[together] = plan.row(together, f"model=GPT({model})")
        against[together] = alone
    return Group(
        name="size",
        title="Model size",
        note="Each size is compared with one worker of that size, which trains on fewer tokens.",
        rows=rows,
        against=against,
    )


def _baselines(plan: Plan) -> Group:
    times = plan.islands
    return Group(
        name="baselines",
        title="Baselines",
        note=f"After the warm start one worker has 1/{times} of the tokens. The other rows have all tokens: in a larger batch on "
        f"one worker, in more updates on one worker, or on islands that exchange at every step (DDP). From "
        f"scratch: one worker in one schedule, without a warm start.",
        rows={
            DEFAULT: default_row(plan),
            "one worker": _one_worker(plan),
            f"{times}x batch": plan.row(f"{times}x batch", "cluster.islands=1", f"algorithm.accumulation={times}", recipe=DDP),
            f"{times}x updates": plan.row(
                f"{times}x updates", "cluster.islands=1", f"train.steps={times * plan.steps}", recipe=DDP
            ),
            "DDP": plan.row("DDP", recipe=DDP),
            "from scratch": _one_worker(plan, "train.warm_start_steps=0", f"train.steps={plan.steps + plan.warm_start}"),
        },
    )


def _one_worker(plan: Plan, *settings: str) -> Row:
    """Plain training: data-parallel training with one island."""
    return plan.row("one worker", *settings, "cluster.islands=1", recipe=DDP)
