"""DiLoCo's claims on one GPU and real text: islands train alone for hundreds of steps, then average.

    python benchmarks/evidence_diloco.py --text prepared/wiki --domains prepared/domains --processes 6  about 35 minutes of one H200
    python benchmarks/evidence_diloco.py --text prepared/wiki --only H --minutes 5           one table, for five minutes
    python benchmarks/evidence_diloco.py --text prepared/small --quick                       smoke test on the CPU

See `evidence.py` for the text and for continuing a record.
"""

from __future__ import annotations

from collections.abc import Sequence

from ablations import DEFAULT, Group, mild
from cells import Row
from diloco_rows import DDP, DILOCO, pools, pruning
from evidence import Evidence
from evidence_diloco_report import DILOCO_ROW, ONE, claims, introduction, plot
from evidence_diloco_rows import Plan, batches, longer_runs, milder_rule, milder_shards, outer_rules, plan, rates, sizes
from record import script


def groups(plan: Plan) -> list[Group]:
    """All tables."""
    shards = _partitions(plan, plan.domains) if plan.domains else None
    return [
        _headline(plan),
        sizes(plan),
        _lengths(plan),
        _counts(plan),
        _drops(plan),
        pools(plan, plan.ramp),
        pruning(plan),
        *([shards] if shards else []),
        outer_rules(plan),
        longer_runs(plan),
        milder_rule(plan),
        *([milder_shards(plan, _diloco_rows(shards))] if shards else []),
        rates(plan),
        batches(plan),
    ]


def _headline(plan: Plan) -> Group:
    return Group(
        name="headline",
        title="The headline",
        note=f"DiLoCo exchanges every {plan.inner_steps} steps; the paper's abstract has 500. After the warm start one worker "
        f"has 1/{plan.islands} of the tokens. {plan.batch}: as many updates with {plan.islands} times the batch, on "
        f"{plan.islands} islands that exchange at every step (DDP). {plan.updates}: one worker with as many tokens as all islands.",
        rows={
            ONE: plan.row(ONE, "cluster.islands=1", recipe=DDP),
            plan.batch: plan.row(plan.batch, recipe=DDP),
            DILOCO_ROW: plan.row(DILOCO_ROW),
            plan.longest: plan.length(plan.lengths[-1]),
            plan.updates: plan.row(plan.updates, "cluster.islands=1", f"train.steps={plan.islands * plan.steps}", recipe=DDP),
        },
    )


def _lengths(plan: Plan) -> Group:
    rounds = ", ".join(str(plan.steps // steps) for steps in plan.lengths)
    return Group(
        name="H",
        title="Inner steps per round (H)",
        note=f"The same steps and tokens, in {rounds} rounds.",
        rows={f"H={steps}": plan.length(steps) for steps in plan.lengths},
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
        title="Lost deltas",
        note="In each round each island's delta is lost with this probability. The island then continues from its own weights. "
        "Tokens are those whose updates were delivered.",
        rows=rows,
    )


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
        title="Equal and unequal shards",
        note=f"Another text, of several domains, on {plan.separate} islands after its own warm start, sharded at random or by "
        f"domain. A delta's weight is the number of examples in its shard.",
        rows=rows,
        against=dict.fromkeys(rows, "domains, IID"),
    )


def _diloco_rows(group: Group) -> dict[str, Row]:
    """The rows of a group that train with DiLoCo."""
    return {label: row for label, row in group.rows.items() if row.recipe == DILOCO}


def _three_seeds(plan: Plan) -> list[str]:
    """Labels of rows with three seeds: the headline, and all round lengths and domains with both outer rules."""
    rows = [label for group in groups(plan) if group.name in ("H", "partition") for label in group.rows]
    return [DILOCO_ROW, ONE, plan.batch, *rows, *map(mild, rows)]


EVIDENCE = Evidence(
    name="evidence_diloco",
    title="DiLoCo on one GPU and real text",
    about=__doc__ or "",
    plan=plan,
    groups=groups,
    standing=lambda plan: {DEFAULT: plan.row(DILOCO_ROW), DILOCO_ROW: plan.row(DILOCO_ROW)},
    default=DILOCO_ROW,
    headline=_three_seeds,
    introduction=introduction,
    reading="The command runs the default. A row adds the settings it shows:",
    claims=claims,
    plot=plot,
)


def main(arguments: Sequence[str] | None = None) -> None:
    EVIDENCE.main(arguments)


if __name__ == "__main__":
    script(main)
