"""The rows of DiLoCo's evidence: the workload, and variations beyond the paper's tables (sizes, rates, batches, outer rules)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ablations import Group, mild
from cells import Row
from diloco_rows import DDP, DILOCO
from evidence import OnGpu
from evidence_diloco_report import DILOCO_ROW, ONE, longer


def nesterov(rate: float, momentum: float) -> str:
    """An outer rule as a setting."""
    return f"Nesterov(lr={rate},momentum={momentum})"


@dataclass(frozen=True, kw_only=True)
class Plan(OnGpu):
    """The workload and the values of the rows."""

    steps: int = 3000
    floor: float = 0.0
    lengths: tuple[int, ...] = (50, 100, 500)  # inner steps per round
    counts: tuple[int, ...] = (1, 4, 8)  # islands
    rates: tuple[float, ...] = (0.5, 2.0)  # of the inner optimizer, as multiples of the rate of other rows
    batches: tuple[int, ...] = (4, 64)  # other batch sizes; larger ones have a third of the steps, in rounds half as long
    outer: tuple[float, float] = (0.7, 0.9)  # the paper's learning rate and momentum
    milder: tuple[float, float] = (0.9, 0.7)  # those of an outer rule for few rounds
    longer: int = 3  # some rows train this many times as long
    small: str = "layers=4,width=128,heads=2,head_size=64"
    ramp: tuple[int, ...] = (1, 2, 3, 4, 4, 5, 5, 6, 7, 8)  # islands over equal parts of a run
    separate: int = 6  # islands for the text of several domains, which has at least as many domains

    def row(self, name: str, *settings: str, recipe: str = DILOCO) -> Row:
        algorithm = f"DiLoCo(inner_steps={self.inner_steps},outer={nesterov(*self.outer)})" if recipe == DILOCO else "DDP()"
        return Row(recipe=recipe, base=self.settings(algorithm, step_time_s="[0.1]"), settings=settings, name=name)

    def length(self, steps: int) -> Row:
        """DiLoCo with this many inner steps per round."""
        return self.row(f"H={steps}", f"algorithm.inner_steps={steps}")

    @property
    def longest(self) -> str:
        """The label of the longest rounds."""
        return f"H={self.lengths[-1]}"

    @property
    def batch(self) -> str:
        """The label of the baseline."""
        return f"{self.islands}x batch"

    @property
    def updates(self) -> str:
        """The label of one worker with as many tokens as all islands."""
        return f"{self.islands}x updates"


def plan(quick: bool) -> Plan:
    if not quick:
        return Plan()
    return Plan(
        steps=8,
        warm_start=2,
        inner_steps=4,
        islands=4,
        longer=2,
        lengths=(2, 4, 8),
        counts=(1, 2, 4),
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


def sizes(plan: Plan) -> Group:
    model = f"model=GPT({plan.small})"
    rows = {
        f"small, {ONE}": plan.row(f"small, {ONE}", model, "cluster.islands=1", recipe=DDP),
        f"small, {plan.batch}": plan.row(f"small, {plan.batch}", model, recipe=DDP),
        "small, DiLoCo": plan.row("small, DiLoCo", model),
    }
    return Group(
        name="small",
        title="A smaller decoder, with more tokens per parameter",
        note="A larger batch gains most early in training, so short runs favour it. A smaller decoder is further in its training "
        "after the same tokens.",
        rows=rows,
        against=dict.fromkeys(rows, f"small, {plan.batch}"),
    )


def rates(plan: Plan) -> Group:
    rows: dict[str, Row] = {}
    for rate in (factor * plan.lr for factor in plan.rates):
        # The warm start has the rate of the other rows.
        own = (f"optimizer.lr.lr={rate:g}", f"optimizer.lr.floor={plan.floor * rate:g}", f"train.warm_start_lr={plan.lr:g}")
        rows |= _three(plan, f"lr {rate:g}", *own)
    return Group(
        name="rate",
        title="The inner learning rate",
        note=f"All other rows have {plan.lr:g}. Each row is compared with the same row at that rate.",
        rows=rows,
        against={label: label.partition(",")[0] for label in rows},
    )


def _three(plan: Plan, name: str, *settings: str) -> dict[str, Row]:
    """One worker, the larger batch, and DiLoCo, with these settings."""
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
        title="Batch size per island",
        note=f"All other rows have {plan.batch_size} sequences. A large batch gains less from being {plan.islands} times larger, "
        f"and so does a longer run: the paper's runs have batches of half a million tokens and 88,000 steps. The warm start has "
        f"the same batch. Rows with large batches have {plan.steps // 3} steps in rounds of {plan.inner_steps // 2}, and repeat "
        f"the text more often.",
        rows=rows,
        against=against,
    )


def _batch_of(plan: Plan, size: int) -> tuple[str, ...]:
    """The settings of a batch size: the same validation text as other rows; a large batch of one island fills a device."""
    batches = max(1, plan.eval_batches * plan.batch_size // size)
    small = (f"train.batch_size={size}", f"data.eval_batches={batches}")
    return small if size <= plan.batch_size else (*small, f"train.steps={plan.steps // 3}", "train.together=apart")


def outer_rules(plan: Plan) -> Group:
    rules = {"SGD 1.0": "SGD(lr=1.0)"}
    for rate, momentum in ((0.7, 0.5), plan.milder, plan.outer):
        rules[f"Nesterov {rate:g}, {momentum:g}"] = nesterov(rate, momentum)
    rows = {name: plan.row(name, f"algorithm.outer={rule}") for name, rule in rules.items()}
    for name in list(rules)[:2]:  # in few long rounds momentum hardly builds up
        label = f"{plan.longest}, {name}"
        rows[label] = plan.row(label, f"algorithm.inner_steps={plan.lengths[-1]}", f"algorithm.outer={rules[name]}")
    rounds = plan.steps // plan.inner_steps
    return Group(
        name="outer",
        title="The outer rule",
        note=f"Learning rate, then momentum. The paper has Nesterov with 0.7 and 0.9 for 128 rounds; these runs have {rounds}, and "
        f"{plan.steps // plan.lengths[-1]} where H is {plan.lengths[-1]}. A momentum of 0.9 averages over about ten rounds.",
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
        f"{plan.lengths[-1]}, after the warm start of all other rows; with the paper's outer rule, and with the milder one of the "
        f"next table.",
        rows=rows,
        against=dict.fromkeys(rows, longer(plan.batch)),
    )


def milder_rule(plan: Plan) -> Group:
    """The rows of the claims, with an outer rule for few rounds."""
    rows = {f"H={steps}": plan.length(steps) for steps in plan.lengths}
    for label, setting in {
        "k=1": "cluster.islands=1",
        "drop 0.5": "cluster.drop_probability=0.5",
        "pruned 0.5": "algorithm.pruned=0.5",
    }.items():
        rows[label] = plan.row(label, setting)
    (rate, momentum), (papers_rate, papers_momentum) = plan.milder, plan.outer
    note = (
        f"Nesterov with {rate:g} and a momentum of {momentum:g}, not {papers_rate:g} and {papers_momentum:g}. Each row is compared "
        f"with the same row under the paper's rule."
    )
    return _milder("milder", "With a milder outer rule", note, plan, rows)


def milder_shards(plan: Plan, shards: Mapping[str, Row]) -> Group:
    """The same for rows with several domains."""
    note = "Each row is compared with the same row under the paper's rule."
    return _milder("milder_shards", "Shards, with a milder outer rule", note, plan, shards)


def _milder(name: str, title: str, note: str, plan: Plan, papers: Mapping[str, Row]) -> Group:
    rows = {
        mild(label): replace(row, settings=(*row.settings, _milder_rule(plan)), name=mild(label)) for label, row in papers.items()
    }
    return Group(name=name, title=title, note=note, rows=rows, against={mild(label): label for label in papers})


def _milder_rule(plan: Plan) -> str:
    return f"algorithm.outer={nesterov(*plan.milder)}"
