"""What is tried besides the paper's tables, to see what they owe to the conditions here: other sizes, rates, batches, outer rules,
and longer runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cells import Row
from diloco_rows import DDP
from evidence_diloco_plan import Plan, nesterov
from evidence_diloco_told import DILOCO_ROW, ONE, longer
from groups import Group, mild


def sizes(plan: Plan) -> Group:
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


def rates(plan: Plan) -> Group:
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


def _three(plan: Plan, name: str, *settings: str) -> dict[str, Row]:
    """One worker, the larger batch, and DiLoCo, with these settings and under this name."""
    rows = {
        f"{ONE}, {name}": plan.row(f"{ONE}, {name}", *settings, "cluster.islands=1", recipe=DDP),
        f"{plan.batch}, {name}": plan.row(f"{plan.batch}, {name}", *settings, recipe=DDP),
    }
    return {**rows, f"DiLoCo, {name}": plan.row(f"DiLoCo, {name}", *settings)}


def batches(plan: Plan) -> Group:
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


def outer_rules(plan: Plan) -> Group:
    rules = {"SGD 1.0": "SGD(lr=1.0)"}
    for rate, momentum in ((0.7, 0.5), plan.milder, plan.outer):
        rules[f"Nesterov {rate:g}, {momentum:g}"] = nesterov(rate, momentum)
    rows = {name: plan.row(name, f"algorithm.outer={rule}") for name, rule in rules.items()}
    for name in list(rules)[:2]:  # a few long rounds, in which momentum hardly builds up
        label = f"{plan.longest}, {name}"
        rows[label] = plan.row(label, f"algorithm.inner_steps={plan.lengths[-1]}", f"algorithm.outer={rules[name]}")
    rounds = plan.steps // plan.inner_steps
    return Group(
        name="outer",
        title="The outer rule",
        note=f"Learning rate, then momentum. The paper takes Nesterov with 0.7 and 0.9 for its 128 rounds; here are {rounds}, and "
        f"{plan.steps // plan.lengths[-1]} where H is {plan.lengths[-1]}. A momentum of 0.9 looks back on ten.",
        rows=rows,
        against={label: plan.longest if label.startswith(plan.longest) else DILOCO_ROW for label in rows},
    )


def longer_runs(plan: Plan) -> Group:
    steps = plan.longer * plan.steps
    setting, every = f"train.steps={steps}", f"algorithm.inner_steps={plan.lengths[-1]}"
    usual, longest = (mild(f"H={length}") for length in (plan.inner_steps, plan.lengths[-1]))
    rows = {
        longer(ONE): plan.row(longer(ONE), setting, "cluster.islands=1", recipe=DDP),
        longer(plan.batch): plan.row(longer(plan.batch), setting, recipe=DDP),
        longer(DILOCO_ROW): plan.row(longer(DILOCO_ROW), setting),
        longer(usual): plan.row(longer(usual), setting, _milder_rule(plan)),
        longer(longest): plan.row(longer(longest), setting, every, _milder_rule(plan)),
    }
    return Group(
        name="longer",
        title=f"{plan.longer} times as long",
        note=f"{steps:,} steps in {steps // plan.inner_steps} rounds, and in {steps // plan.lengths[-1]} where H is "
        f"{plan.lengths[-1]}, after a warm start of as many steps as all others; with the paper's outer rule, and with the milder "
        f"one of the next table.",
        rows=rows,
        against=dict.fromkeys(rows, longer(plan.batch)),
    )


def milder_rule(plan: Plan) -> Group:
    """What is claimed, with an outer rule for as few rounds as there are."""
    tried = {f"H={steps}": plan.length(steps) for steps in plan.lengths}
    for label, setting in {
        "k=1": "cluster.islands=1",
        "drop 0.5": "cluster.drop_probability=0.5",
        "pruned 0.5": "algorithm.pruned=0.5",
    }.items():
        tried[label] = plan.row(label, setting)
    (rate, momentum), (papers_rate, papers_momentum) = plan.milder, plan.outer
    note = (
        f"Nesterov with {rate:g} and a momentum of {momentum:g}, not {papers_rate:g} and {papers_momentum:g}. Each row is compared "
        f"with its like under the paper's rule."
    )
    return _milder("milder", "With a milder outer rule", note, plan, tried)


def milder_shards(plan: Plan, shards: Mapping[str, Row]) -> Group:
    """The same for rows of several domains."""
    note = "Each row is compared with its like under the paper's rule."
    return _milder("milder_shards", "Shards, with a milder outer rule", note, plan, shards)


def _milder(name: str, title: str, note: str, plan: Plan, like: Mapping[str, Row]) -> Group:
    rows = {
        mild(label): replace(row, settings=(*row.settings, _milder_rule(plan)), name=mild(label)) for label, row in like.items()
    }
    return Group(name=name, title=title, note=note, rows=rows, against={mild(label): label for label in like})


def _milder_rule(plan: Plan) -> str:
    return f"algorithm.outer={nesterov(*plan.milder)}"
