"""The demo over several seeds: do the algorithms reach the same loss, and at what cost in bytes and time?

    python benchmarks/demo_seeds.py                          demo-ddp and demo-diloco, seeds 0, 1 and 2
    python benchmarks/demo_seeds.py demo-acco --seeds 0 1    further recipes, other seeds

It asserts nothing. It also trains demo-ddp at other learning rates after the same warm start, to see whether the rate of the recipe
is the best of them for the baseline: a baseline at a bad rate would flatter everything else.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import figure_text
from atoll import recipes
from atoll.core.errors import ConfigError
from atoll.optim.schedules import Cosine
from cells import Outcome, Row, carry_out
from record import Record, default_path, markdown_table, script

BASELINE = "demo-ddp"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    names = list(dict.fromkeys([BASELINE, "demo-diloco", *options.recipes]))
    base = tuple(options.set)
    rows = {name: Row(recipe=name, base=base) for name in names}
    own = own_rate(base)
    tried = [own / 2, own * 2] if options.rates is None else options.rates
    rates = {rate: rate_row(rate, base) for rate in sorted({own, *tried})}
    record = Record(options.record or default_path("demo_seeds"))
    outcomes = carry_out([*rows.values(), *rates.values()], options.seeds, record, "demo over seeds", quiet=options.quiet)
    sections = report(
        {name: outcomes[row] for name, row in rows.items()}, {rate: outcomes[row] for rate, row in rates.items()}, base
    )
    readme = record.write(f"The demo over seeds {', '.join(map(str, options.seeds))}", sections)
    print("\n\n".join(sections))
    print(f"\nrecord: {readme}")


def own_rate(base: Sequence[str]) -> float:
    """The peak learning rate of the baseline's recipe."""
    return _schedule(base).lr


def rate_row(rate: float, base: tuple[str, ...]) -> Row:
    """The baseline at another peak rate, with the same shape of schedule, from the same warm start.

    The rate is that of DDP's own optimizer: the Run's optimizer trains the warm start, and stays as it is.
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
        raise ConfigError(f"optimizer.lr={lr}: the rates of a Cosine are swept. Leave the recipe's schedule.")
    return lr


def as_setting(value: Any) -> str:
    """A value as `--set` reads it.

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
        "## Outcome\n\n" + "\n".join(f"- {text}" for text in [*sentences, rates_sentence(rates, own_rate(base))]),
        f"## Recipes\n\n{figure_text.RULE} Tokens include those of the warm start.\n\n{_recipes_table(outcomes)}",
        "## The baseline's learning rate\n\nThe peak of the schedule, after the same warm start; the recipe's own is marked.\n\n"
        + _rates_table(rates, own_rate(base)),
    ]


def sentence(name: str, outcome: Outcome, baseline: Outcome) -> str:
    """What a recipe costs and brings against the baseline."""
    found, verdict = figure_text.difference_text(outcome.loss, baseline.loss)
    words = {
        "none": f"no difference in loss between these seeds and {BASELINE}'s",
        "lower": f"a lower loss than {BASELINE}",
        "higher": f"a higher loss than {BASELINE}",
        "one seed": f"one seed only, so no verdict against {BASELINE}",
    }
    told = f"{words[verdict]} ({found})" if verdict in words else "it diverged"
    sent, ratio = figure_text.bytes_text(outcome), figure_text.bytes_ratio_text(outcome, baseline)
    tokens = figure_text.tokens_ratio(outcome, baseline)
    work = "the same tokens" if tokens == 1 else f"{tokens:.3g} times the tokens" if tokens else "unknown tokens"
    times = f"{figure_text.time_text(outcome)} of virtual time against {figure_text.time_text(baseline)}"
    return f"{name}: {told}, with {work}, {sent} sent per island ({ratio} of {BASELINE}'s) and {times}."


def rates_sentence(rates: Mapping[float, Outcome], own: float) -> str:
    """Which rate is best, and whether another is shown to be better than the recipe's."""
    losses = {rate: outcome.loss.mean for rate, outcome in rates.items() if outcome.loss is not None}
    if own not in losses:
        return f"{BASELINE} diverged at its own learning rate of {own:g}."
    best = min(losses, key=lambda rate: losses[rate])
    tried = ", ".join(f"{rate:g}" for rate in rates)
    if best == own:
        return f"Of the learning rates {tried} the recipe's {own:g} gives {BASELINE} the lowest mean loss."
    found, verdict = figure_text.difference_text(rates[best].loss, rates[own].loss)
    return f"Of the learning rates {tried}, {best:g} gives {BASELINE} a lower mean than the recipe's {own:g}: {found}, {verdict}."


def _recipes_table(outcomes: Mapping[str, Outcome]) -> str:
    baseline = outcomes[BASELINE]
    headings = ["recipe", "val loss", "least to greatest", f"against {BASELINE}", "verdict", "tokens", "sent per island"]
    headings += [f"of {BASELINE}'s", "virtual time", "busy"]
    rows = []
    for name, outcome in outcomes.items():
        against = ("-", "-") if outcome is baseline else figure_text.difference_text(outcome.loss, baseline.loss)
        tokens, sent = figure_text.tokens_text(outcome, baseline), figure_text.bytes_text(outcome)
        costs = [
            tokens,
            sent,
            figure_text.bytes_ratio_text(outcome, baseline),
            figure_text.time_text(outcome),
            figure_text.busy_text(outcome),
        ]
        rows.append([name, *figure_text.loss_text(outcome), *against, *costs])
    return markdown_table(headings, rows)


def _rates_table(rates: Mapping[float, Outcome], own: float) -> str:
    rows = []
    for rate, outcome in rates.items():
        against = ("-", "-") if rate == own else figure_text.difference_text(outcome.loss, rates[own].loss)
        rows.append([f"{rate:g}" + (" (the recipe's)" if rate == own else ""), *figure_text.loss_text(outcome), *against])
    return markdown_table(["learning rate", "val loss", "least to greatest", "against the recipe's", "verdict"], rows)


def _parser() -> argparse.ArgumentParser:
    first = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    known = ", ".join(name for name in recipes.ALL if name.startswith("demo-"))
    parser.add_argument(
        "recipes", nargs="*", metavar="RECIPE", default=[], help=f"further recipes, beside the two; there are: {known}"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run per recipe and seed")
    parser.add_argument(
        "--rates", type=float, nargs="*", help="learning rates to try on the baseline; None: half and twice its own"
    )
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting of every run")
    parser.add_argument("--record", type=Path, help="the record's folder; None: records/<today>_demo_seeds")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


if __name__ == "__main__":
    script(main)
