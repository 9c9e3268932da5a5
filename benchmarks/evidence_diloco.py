"""DiLoCo's claims on one GPU and real text: train apart for hundreds of steps, then agree.

    python benchmarks/evidence_diloco.py --text prepared/wiki --domains prepared/domains --processes 6  about 20 minutes of one H200
    python benchmarks/evidence_diloco.py --text prepared/wiki --only H --minutes 5           one table, or as far as it comes
    python benchmarks/evidence_diloco.py --text prepared/small --quick                       in miniature on the CPU

See `evidence.py` for the text and for going on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cells import Row
from diloco_rows import DDP, DILOCO, pools, pruning
from evidence import Evidence, OnGpu
from evidence_diloco_told import DILOCO_ROW, ONE, claims, introduction, plot
from groups import DEFAULT, Group
from record import script


@dataclass(frozen=True, kw_only=True)
class Plan(OnGpu):
    """The workload, and the values that rows run through.

    Attributes:
        lengths: of rounds, in inner steps.
        counts: of islands.
        rates: of the inner rule, as multiples of that of all other rows.
        batches: sizes of other batches. Larger ones have a third of the steps, in rounds half as long.
        outer: the outer rule of all rows that name no other.
        small: sizes of a smaller decoder.
        ramp: how many islands there are over equal parts of a run.
        separate: islands of the text of several domains, of which it has at least as many.
    """

    steps: int = 3000
    floor: float = 0.0
    lengths: tuple[int, ...] = (50, 100, 500)
    counts: tuple[int, ...] = (1, 4, 8)
    rates: tuple[float, ...] = (0.5, 2.0)
    batches: tuple[int, ...] = (4, 64)
    outer: str = "Nesterov(lr=0.7,momentum=0.9)"
    small: str = "layers=4,width=128,heads=2,head_size=64"
    ramp: tuple[int, ...] = (1, 2, 3, 4, 4, 5, 5, 6, 7, 8)
    separate: int = 6

    def row(self, name: str, *settings: str, recipe: str = DILOCO) -> Row:
        algorithm = f"DiLoCo(inner_steps={self.inner_steps},outer={self.outer})" if recipe == DILOCO else "DDP()"
        return Row(recipe=recipe, base=self.settings(algorithm, step_time_s="[0.1]"), settings=settings, name=name)

    @property
    def batch(self) -> str:
        """The label of the baseline."""
        return f"{self.islands}x batch"

    @property
    def updates(self) -> str:
        """The label of one worker that trains for longer."""
        return f"{self.islands}x updates"


def plan(quick: bool) -> Plan:
    if not quick:
        return Plan()
    return Plan(
        steps=8,
        warm_start=2,
        inner_steps=4,
        islands=4,
        lengths=(2, 4),
        counts=(1, 4),
        rates=(2.0,),
        batches=(1, 4),
        ramp=(1, 4),
        model="layers=1,width=16,heads=2,head_size=8",
        small="layers=1,width=8,heads=1,head_size=8",
        seq_len=16,
        eval_batches=2,
        batch_size=2,
        warmup=2,
    )


def groups(plan: Plan) -> list[Group]:
    """All tables."""
    return [
        _headline(plan),
        _sizes(plan),
        _lengths(plan),
        _counts(plan),
        _drops(plan),
        pools(plan, plan.ramp),
        pruning(plan),
        *([_partitions(plan, plan.domains)] if plan.domains else []),
        _outer(plan),
        _rates(plan),
        _batches(plan),
    ]


def _headline(plan: Plan) -> Group:
    return Group(
        name="headline",
        title="The headline",
        note=f"DiLoCo agrees every {plan.inner_steps} steps; the paper's abstract has 500. After the warm start one worker "
        f"has 1/{plan.islands} of the tokens. {plan.batch}: as many updates, with so many times the batch, spread over "
        f"{plan.islands} islands that talk at every step (DDP). {plan.updates}: one worker, on as many tokens as all islands.",
        rows={
            ONE: plan.row(ONE, "cluster.islands=1", recipe=DDP),
            plan.batch: plan.row(plan.batch, recipe=DDP),
            DILOCO_ROW: plan.row(DILOCO_ROW),
            _longest(plan): _length(plan, plan.lengths[-1]),
            plan.updates: plan.row(plan.updates, "cluster.islands=1", f"train.steps={plan.islands * plan.steps}", recipe=DDP),
        },
    )


def _longest(plan: Plan) -> str:
    return f"H={plan.lengths[-1]}"


def _length(plan: Plan, steps: int) -> Row:
    return plan.row(f"H={steps}", f"algorithm.inner_steps={steps}")


def _sizes(plan: Plan) -> Group:
    model = f"model=GPT({plan.small})"
    rows = {
        f"small, {ONE}": plan.row(f"small, {ONE}", model, "cluster.islands=1", recipe=DDP),
        f"small, {plan.batch}": plan.row(f"small, {plan.batch}", model, recipe=DDP),
        "small, DiLoCo": plan.row("small, DiLoCo", model),
    }
    return Group(
        name="small",
        title="A smaller decoder, with more tokens to a parameter",
        note="A larger batch gains most early in training, so that short runs flatter it: the smaller the decoder, the further on "
        "is a run of the same tokens.",
        rows=rows,
        against=dict.fromkeys(rows, f"small, {plan.batch}"),
    )


def _three(plan: Plan, name: str, *settings: str) -> dict[str, Row]:
    """One worker, the larger batch, and DiLoCo, with these settings and under this name."""
    rows = {
        f"{ONE}, {name}": plan.row(f"{ONE}, {name}", *settings, "cluster.islands=1", recipe=DDP),
        f"{plan.batch}, {name}": plan.row(f"{plan.batch}, {name}", *settings, recipe=DDP),
    }
    return {**rows, f"DiLoCo, {name}": plan.row(f"DiLoCo, {name}", *settings)}


def _rates(plan: Plan) -> Group:
    rows: dict[str, Row] = {}
    for rate in (factor * plan.lr for factor in plan.rates):
        # The warm start is the same for all: its rate is that of the other rows.
        own = (f"optimizer.lr.lr={rate:g}", f"optimizer.lr.floor={plan.floor * rate:g}", f"train.warm_start_lr={plan.lr:g}")
        rows |= _three(plan, f"lr {rate:g}", *own)
    return Group(
        name="rate",
        title="The inner rate",
        note=f"All other rows have {plan.lr:g}. Each is compared with its like.",
        rows=rows,
        against={label: label.partition(",")[0] for label in rows},
    )


def _batches(plan: Plan) -> Group:
    rows: dict[str, Row] = {}
    against: dict[str, str] = {}
    for size in plan.batches:
        three = _three(plan, f"batch {size}", *_batch_of(plan, size))
        if size > plan.batch_size:
            label = f"{DILOCO_ROW}, batch {size}"
            three[label] = replace(
                three[label], settings=(*three[label].settings, f"algorithm.inner_steps={plan.inner_steps // 2}")
            )
        rows |= three
        against |= dict.fromkeys(three, f"{plan.batch}, batch {size}")
    return Group(
        name="batch",
        title="The batch of one island",
        note=f"All other rows have {plan.batch_size} sequences. A batch that is already large gains less from being {plan.islands} "
        f"times larger, and so does a run that is further on: the paper's have half a million tokens, and 88,000 steps. The warm "
        f"start has the same batch. Large ones have {plan.steps // 3} steps here, in rounds of {plan.inner_steps // 2}, and read "
        f"the text more often.",
        rows=rows,
        against=against,
    )


def _batch_of(plan: Plan, size: int) -> tuple[str, ...]:
    """Its settings: judged on the same windows as all others; one island's large batch fills a device."""
    batches = max(1, plan.eval_batches * plan.batch_size // size)
    small = (f"train.batch_size={size}", f"data.eval_batches={batches}")
    return small if size <= plan.batch_size else (*small, f"train.steps={plan.steps // 3}", "train.together=apart")


def _outer(plan: Plan) -> Group:
    rules = {
        "SGD 1.0": "SGD(lr=1.0)",
        "Nesterov 0.7, 0.5": "Nesterov(lr=0.7,momentum=0.5)",
        "Nesterov 0.9, 0.7": "Nesterov(lr=0.9,momentum=0.7)",
        "Nesterov 0.7, 0.9": "Nesterov(lr=0.7,momentum=0.9)",
    }
    rows = {name: plan.row(name, f"algorithm.outer={rule}") for name, rule in rules.items()}
    for name in list(rules)[:2]:  # a few long rounds, in which momentum hardly builds up
        label = f"{_longest(plan)}, {name}"
        rows[label] = plan.row(label, f"algorithm.inner_steps={plan.lengths[-1]}", f"algorithm.outer={rules[name]}")
    rounds = plan.steps // plan.inner_steps
    return Group(
        name="outer",
        title="The outer rule",
        note=f"Learning rate, then momentum. The paper takes Nesterov with 0.7 and 0.9 for its 128 rounds; here are {rounds}, and "
        f"{plan.steps // plan.lengths[-1]} where H is {plan.lengths[-1]}. A momentum of 0.9 looks back on ten.",
        rows=rows,
        against={label: _longest(plan) if label.startswith(_longest(plan)) else DILOCO_ROW for label in rows},
    )


def _lengths(plan: Plan) -> Group:
    rounds = ", ".join(str(plan.steps // steps) for steps in plan.lengths)
    return Group(
        name="H",
        title="Steps between two agreements (H)",
        note=f"The same steps and tokens, in {rounds} rounds.",
        rows={f"H={steps}": _length(plan, steps) for steps in plan.lengths},
    )


def _counts(plan: Plan) -> Group:
    return Group(
        name="k",
        title="Islands (k)",
        note="The same steps per island, so tokens grow with k.",
        rows={f"k={count}": plan.row(f"k={count}", f"cluster.islands={count}") for count in plan.counts},
        against={f"k={count}": ONE for count in plan.counts},
    )


def _drops(plan: Plan) -> Group:
    rows = {f"drop {p}": plan.row(f"drop {p}", f"cluster.drop_probability={p}") for p in (0, 0.5)}
    return Group(
        name="drop",
        title="Deltas that get lost",
        note="Each island's delta is lost with this probability, each round anew, and the island goes on from its own weights. "
        "Tokens are those whose updates arrived in the end.",
        rows=rows,
    )


def _partitioned(plan: Plan) -> list[str]:
    """Labels of rows on several domains."""
    return list(_partitions(plan, plan.domains).rows) if plan.domains else []


def _partitions(plan: Plan, domains: str) -> Group:
    text = (plan.reading(domains), f"cluster.islands={plan.separate}")
    shards = {"IID": "IID()", "by domain": "ByDomain()"}
    rows = {
        f"domains, {name}": plan.row(f"domains, {name}", *text, f"data.partition={partition}", "algorithm.weighting=examples")
        for name, partition in shards.items()
    }
    one = f"domains, {ONE}"
    rows[one] = plan.row(one, text[0], "cluster.islands=1", recipe=DDP)
    return Group(
        name="partition",
        title="Shards that are alike and shards that differ",
        note=f"Another text, of several domains, on {plan.separate} islands after a warm start of its own: dealt out at random, or "
        f"domain by domain. Deltas weigh as much as their shard has examples.",
        rows=rows,
        against=dict.fromkeys(rows, "domains, IID"),
    )


EVIDENCE = Evidence(
    name="evidence_diloco",
    title="DiLoCo on one GPU and real text",
    about=__doc__ or "",
    plan=plan,
    groups=groups,
    standing=lambda plan: {DEFAULT: plan.row(DILOCO_ROW), DILOCO_ROW: plan.row(DILOCO_ROW)},
    called=DILOCO_ROW,
    headline=lambda plan: (DILOCO_ROW, ONE, plan.batch, *(f"H={steps}" for steps in plan.lengths), *_partitioned(plan)),
    introduction=introduction,
    reading="This is the default, and a row adds the settings it shows:",
    claims=claims,
    plot=plot,
)


def main(arguments: Sequence[str] | None = None) -> None:
    EVIDENCE.main(arguments)


if __name__ == "__main__":
    script(main)
