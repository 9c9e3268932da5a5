"""The demo over several seeds: loss, bytes and time of each algorithm.

    python benchmarks/demo_seeds.py                          demo-ddp and demo-diloco, seeds 0, 1 and 2
    python benchmarks/demo_seeds.py demo-acco demo-async --docs README.md    further recipes, and README's table

It also trains demo-ddp on one island, which shows what the four-fold batch gains, and at other learning rates after the same warm
start: a baseline at a bad rate would favour all other recipes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import figure_text
from atoll import recipes
from atoll.core.errors import ConfigError
from atoll.engines.simulator.virtual_time_estimate import time_on_slower_links
from atoll.optim.schedules import Cosine
from atoll.telemetry.units import human_count, human_time
from cells import Outcome, Row, run_rows, seeds_parser, seeds_text
from record import bullets, markdown_table, open_record, replace_between, script

BASELINE = "demo-ddp"
ONE = "one island"

LABELS = {
    ONE: "one island alone, 1/4 of the tokens",
    "demo-ddp": "DDP: islands average every gradient",
    "demo-acco": "ACCO: islands exchange one half of a batch while they compute the other",
    "demo-diloco": "DiLoCo: islands average every 20 steps",
    "demo-async": "asynchronous: Delayed Nesterov with Dynamic Local Updates",
}
"""The rows of README's table, in its order."""

SLOWER = 10
"""README also shows the times on links that are slower by this factor."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = seeds_parser(__doc__, "demo_seeds", "README.md")
    known = ", ".join(name for name in recipes.ALL if name.startswith("demo-"))
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", default=[], help=f"further recipes, of {known}")
    parser.add_argument("--rates", type=float, nargs="*", help="learning rates of the baseline; None: half and twice its own")
    options = parser.parse_args(arguments)
    names = list(dict.fromkeys([BASELINE, "demo-diloco", *options.recipes]))
    base = tuple(options.set)
    rows = {name: Row(recipe=name, base=base) for name in names}
    rows[ONE] = Row(recipe=BASELINE, base=base, settings=("cluster.islands=1",), name=ONE)
    own = own_rate(base)
    tried = [own / 2, own * 2] if options.rates is None else options.rates
    rates = {rate: rate_row(rate, base) for rate in sorted({own, *tried})}
    record = open_record(options, "demo_seeds")
    how = {"quiet": options.quiet, "processes": options.processes}
    outcomes = run_rows(rows, options.seeds, record, "demo over seeds", **how)
    at_rates = run_rows(rates, options.seeds, record, f"{BASELINE} at other rates", **how)
    record.publish(f"The demo, {seeds_text(options.seeds)}", report(outcomes, at_rates, base))
    if options.docs is not None:
        replace_between(options.docs, "demo_table", brief_table(outcomes))


def own_rate(base: Sequence[str]) -> float:
    """The peak learning rate of the baseline's recipe."""
    return _schedule(base).lr


def rate_row(rate: float, base: tuple[str, ...]) -> Row:
    """The baseline at another peak rate, with a schedule of the same shape, from the same warm start.

    The rate is that of the algorithm's optimizer. The Run's optimizer, which trains the warm start, does not change.
    """
    if rate == own_rate(base):
        return Row(recipe=BASELINE, base=base)
    run, schedule = Row(recipe=BASELINE, base=base).run(0), _schedule(base)
    lr = replace(schedule, lr=rate, floor=float(f"{schedule.floor * rate / schedule.lr:.6g}"))
    optimizer = f"algorithm.optimizer={as_setting(replace(run.optimizer, lr=lr))}"
    return Row(recipe=BASELINE, base=base, settings=(optimizer,), name=f"{BASELINE} at {rate:g}")


def _schedule(base: Sequence[str]) -> Cosine:
    lr = Row(recipe=BASELINE, base=tuple(base)).run(0).optimizer.lr
    if not isinstance(lr, Cosine):
        raise ConfigError(f"optimizer.lr={lr}: the sweep needs a Cosine schedule. Keep the recipe's.")
    return lr


def as_setting(value: Any) -> str:
    """A value in the syntax of `--set`.

    >>> as_setting(Cosine(lr=0.003, warmup=20))
    'Cosine(lr=0.003,steps=none,warmup=20,floor=0.0)'
    """
    if is_dataclass(value):
        inside = ",".join(f"{field.name}={as_setting(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__}({inside})"
    if isinstance(value, tuple):
        return f"[{','.join(map(as_setting, value))}]"
    return str(value).lower() if value is None or isinstance(value, bool) else repr(value)


# ------------------------------------------------------------------------------------------------------------- the report


def report(outcomes: Mapping[str, Outcome], rates: Mapping[float, Outcome], base: Sequence[str]) -> list[str]:
    """The sections of the record."""
    baseline = outcomes[BASELINE]
    sentences = [sentence(name, outcome, baseline) for name, outcome in outcomes.items() if name != BASELINE]
    return [
        "## Outcome\n\n" + bullets([*sentences, rates_sentence(rates, own_rate(base))]),
        f"## Recipes\n\n{figure_text.RULE} Tokens include the warm start.\n\n{_recipes_table(outcomes)}",
        "## The baseline's learning rate\n\nThe peak of the schedule, after the same warm start; the recipe's rate is marked.\n\n"
        + _rates_table(rates, own_rate(base)),
    ]


def sentence(name: str, outcome: Outcome, baseline: Outcome) -> str:
    """Loss, bytes and time of a recipe compared with the baseline."""
    found, verdict = figure_text.difference_text(outcome.loss, baseline.loss)
    losses = f"loss minus that of {BASELINE} {found} (verdict: {verdict})" if found != "-" else "it diverged"
    sent, ratio = figure_text.bytes_text(outcome), figure_text.bytes_ratio_text(outcome, baseline)
    tokens = figure_text.tokens_ratio(outcome, baseline)
    work = "the same tokens" if tokens == 1 else f"{tokens:.3g} times the tokens" if tokens else "unknown tokens"
    times = f"{figure_text.time_text(outcome)} of virtual time against {figure_text.time_text(baseline)}"
    return f"{name}: {losses}, with {work}, {sent} sent per island ({ratio} of {BASELINE}'s) and {times}."


def rates_sentence(rates: Mapping[float, Outcome], own: float) -> str:
    """The best rate, and its difference from the recipe's."""
    losses = {rate: outcome.loss.mean for rate, outcome in rates.items() if outcome.loss is not None}
    if own not in losses:
        return f"{BASELINE} diverged at its own learning rate of {own:g}."
    best = min(losses, key=lambda rate: losses[rate])
    tried = ", ".join(f"{rate:g}" for rate in rates)
    if best == own:
        return f"Of the learning rates {tried}, the recipe's {own:g} gives {BASELINE} the lowest mean loss."
    found, verdict = figure_text.difference_text(rates[best].loss, rates[own].loss)
    return f"Of the learning rates {tried}, {best:g} gives {BASELINE} a lower mean than the recipe's {own:g}: {found}, {verdict}."


def _recipes_table(outcomes: Mapping[str, Outcome]) -> str:
    baseline = outcomes[BASELINE]
    headings = [*figure_text.loss_headings(BASELINE), "tokens", "sent per island"]
    headings += [f"over {BASELINE}'s", "virtual time", "utilisation"]
    rows = []
    for name, outcome in outcomes.items():
        tokens, sent = figure_text.tokens_text(outcome, baseline), figure_text.bytes_text(outcome)
        costs = [
            tokens,
            sent,
            figure_text.bytes_ratio_text(outcome, baseline),
            figure_text.time_text(outcome),
            figure_text.utilisation_text(outcome),
        ]
        rows.append([name, *figure_text.loss_columns(outcome, baseline), *costs])
    return markdown_table(headings, rows)


def brief_table(outcomes: Mapping[str, Outcome]) -> str:
    """README's table: mean ± standard deviation over the seeds, and the cost of each algorithm, also on slower links."""
    headings = ["algorithm", "validation loss", "tokens", "sent per island", "virtual time", "utilisation"]
    rows = []
    for name, label in LABELS.items():
        outcome = outcomes.get(name)
        if outcome is None or outcome.loss is None:
            continue
        spread = f" ± {outcome.loss.std:.3f}" if outcome.loss.std is not None else ""
        tokens = human_count(outcome.mean("tokens") or 0)
        costs = [figure_text.bytes_text(outcome), figure_text.time_text(outcome), figure_text.utilisation_text(outcome)]
        rows.append([label, f"{outcome.loss.mean:.3f}{spread}", tokens, *costs, _slower_text(outcome)])
    return markdown_table([*headings, f"on links {SLOWER} times slower"], rows)


def _slower_text(outcome: Outcome) -> str:
    if not outcome.mean("sent_bytes_per_island"):
        return figure_text.time_text(outcome)
    return human_time(time_on_slower_links(outcome.row.run(0), int(outcome.summaries[0]["params"]), SLOWER))


def _rates_table(rates: Mapping[float, Outcome], own: float) -> str:
    rows = []
    for rate, outcome in rates.items():
        label = f"{rate:g}" + (" (the recipe's)" if rate == own else "")
        rows.append([label, *figure_text.loss_columns(outcome, rates[own])])
    return markdown_table(["learning rate", *figure_text.loss_headings("the recipe's")[1:]], rows)


if __name__ == "__main__":
    script(main)
