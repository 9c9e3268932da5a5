"""The tables and plots of `paper_claims.py`; `paper_claims_verdicts.py` has the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import figure_text
import paper_claims_choices as choices_of
import paper_claims_rows as rows_of
from ablations import Group
from atoll.telemetry.plot_style import save_figure
from atoll.telemetry.units import human_bytes, human_count, human_time, human_times
from cells import Outcome
from claims import INTERVAL_RULE, Claim, lower
from curves import costs_figure, deltas_figure
from paper_claims_rows import ACCO, DELAYED, DPU, FREE, ONE, OVERLAPPED, SYNC, WP, Choice, Plan, diloco, times_batch
from paper_claims_verdicts import (
    CLOSE,
    EDGE_RULE,
    NO_TIME,
    NOTATION,
    Outcomes,
    Study,
    claims_table,
    compared_text,
    deltas_lines,
    deltas_table,
    exchange_share,
    fewer_text,
    further_claims,
    gate_lines,
    headline_claims,
    missing_lines,
    noise_text,
    rules_text,
    verdict,
)
from record import bullets, markdown_table

# --------------------------------------------------------------------------------------------------------------------- tables


def choices_table(study: Study) -> str:
    """What each method chose, and where it ended elsewhere on the grid."""
    plan, tried, rows = study.plan, study.tried, []
    for method in rows_of.METHODS:
        if method not in study.choices:
            continue
        choice, rules = study.choices[method], choices_of.outers_of(plan, method)
        rates = choices_of.tried_rates(plan, tried, method, choice.outer)
        edge = "*" if method in study.edge else ""
        shown = [f"{rate:g}: {_tried(tried, method, Choice(rate, choice.outer))}" for rate in rates]
        outers = [f"{_rule(rule)}: {_tried(tried, method, Choice(plan.rate, rule))}" for rule in rules]
        outer = [_rule(choice.outer), ", ".join(outers)] if len(rules) > 1 else ["-", "-"]
        rows.append([method, f"{choice.rate:g}{edge}", ", ".join(shown), *outer])
    headings = ["method", "inner rate", "rate: loss", "outer rule", f"rule: loss, at a rate of {plan.rate:g}"]
    edges = [f"`{method}`" for method in rows_of.METHODS if method in study.edge]
    notes = [
        "An outer rule is its learning rate/its momentum. Three outer rules are no grid, so none is marked.",
        "* marks a rate at the edge of those that were tried: a rate beyond it may be better, so the method's best is not known. "
        f"At an edge: {', '.join(edges) or 'none'}.",
        "The rule of the choice: the lowest loss of one seed, without a margin, also if a further rate is lower by less than the "
        "noise of a repetition.",
        "A further rate, of half of the first or twice the last, is tried where the first or the last was best; it counts once it "
        "was run.",
    ]
    return f"{markdown_table(headings, rows)}\n\n{bullets(notes)}"


def _rule(outer: tuple[float, float]) -> str:
    return f"{outer[0]:g}/{outer[1]:g}"


def _tried(tried: Outcomes, method: str, choice: Choice) -> str:
    outcome = tried.get(choices_of.choice_label(method, choice))
    if outcome is None or not (outcome.summaries or outcome.errors):
        return "-"
    return "diverged" if outcome.loss is None else f"{outcome.loss.mean:.4f}"


def table(study: Study, group: Group, seeds: int) -> str:
    """A group's rows: loss, difference from the row it is compared with, costs, and how often the text was read. A row with fewer
    seeds than those of the study says so."""
    rows, outcomes = [], study.outcomes
    for label in group.rows:
        if label not in outcomes:
            rows.append([label, NO_TIME, *["-"] * 6])
            continue
        outcome, other = outcomes[label], group.against.get(label)
        compared = compared_text(study, label, other)
        same = other is None or compared == "-"
        share = "-" if same else figure_text.time_ratio_text(outcome, outcomes[str(other)])
        named = label + fewer_text(outcome, seeds)
        rows.append(
            [named, figure_text.loss_text(outcome)[0], "-" if same else str(other), compared, *_costs(study, outcome), share]
        )
    costs = ["sent per island", "text read", "virtual time", "time, as a share"]
    return markdown_table(["row", "validation loss", "compared with", "difference", *costs], rows, left=1)


def _costs(study: Study, outcome: Outcome) -> list[str]:
    read = "-" if outcome.tokens is None else f"{human_times(outcome.tokens / study.text['train']['tokens'])} times"
    return [figure_text.bytes_text(outcome), read, figure_text.time_text(outcome)]


REACH_RULE = (
    "A row reaches a loss if every seed of it does. The first crossing counts, on a line between two evaluations, and "
    'the time is the mean over seeds. "never": a seed ended without it, also where the mean of the seeds is below it.'
)


def reach_time_s(outcome: Outcome, loss: float) -> float | None:
    """The virtual time at which a row's validation loss has fallen to this value, mean over seeds, linear between evaluations. None
    if a seed never reaches it."""
    times = [_crossing(curve, loss) for curve in outcome.curves]
    return None if not times or None in times else fmean(time_s for time_s in times if time_s is not None)


def _crossing(curve: Sequence[tuple[float, int, float]], loss: float) -> float | None:
    """
    >>> _crossing([(0.0, 0, 3.0), (10.0, 1, 2.0), (20.0, 2, 1.5)], 1.75), _crossing([(0.0, 0, 3.0)], 1.0)
    (15.0, None)
    """
    for (start_s, _, high), (end_s, _, low) in pairwise(curve):
        if high > loss >= low:
            return start_s + (end_s - start_s) * (high - loss) / (high - low)
    return None


def reach_table(outcomes: Outcomes, rows: Sequence[str], target: str, seeds: int) -> str:
    """Virtual time until each row has the loss at which the target row ends, with a margin. A row with fewer seeds than those of
    the study says so."""
    end = outcomes[target].loss
    if end is None:
        return f"{target} diverged: there is no loss to reach."
    loss = end.mean + CLOSE
    times = {label: reach_time_s(outcomes[label], loss) for label in rows if label in outcomes}
    whole_s = times[target]
    lines = [
        [
            label + fewer_text(outcomes[label], seeds),
            "never" if time_s is None else human_time(time_s),
            "-" if time_s is None or whole_s is None else f"{time_s / whole_s:.3f}",
        ]
        for label, time_s in times.items()
    ]
    return f"Virtual time until the loss is {loss:.4f}, {CLOSE:g} above the end of {target}:\n\n" + markdown_table(
        ["row", "virtual time", f"over {target}"], lines
    )


def reach_tables(plan: Plan, outcomes: Outcomes, seeds: int) -> list[str]:
    """DiLoCo against each larger batch, asynchronous against synchronous training, ACCO against a DDP that overlaps, also over a
    slow link and with a slow worker."""
    rows = {times_batch(k): [times_batch(k), *(diloco(k, length) for length in plan.lengths)] for k in plan.counts}
    rows |= {SYNC: [SYNC, *rows_of.HUB], OVERLAPPED: [OVERLAPPED, rows_of.ZERO, ACCO, FREE, DPU, WP]}
    for named, methods in ((rows_of.on_slow_link, rows_of.SLOW_LINK), (rows_of.with_slow_worker, rows_of.SLOW_WORKER)):
        rows[named(OVERLAPPED)] = [named(method) for method in methods]
    return [reach_table(outcomes, labels, target, seeds) for target, labels in rows.items() if target in outcomes]


# ----------------------------------------------------------------------------------------------------------------------- plots


def save_plots(plan: Plan, outcomes: Outcomes, folder: Path) -> dict[str, str]:
    """Loss against tokens, virtual time and bytes: the headline with few islands, and DiLoCo with many or in long rounds. Cosines
    and norms of DiLoCo's deltas over a run. Returns captions by file; empty if there is nothing to draw."""
    few, many, (short, middle, long) = plan.islands, plan.many, plan.lengths
    if diloco(few, short) not in outcomes:
        return {}
    first = [ONE, times_batch(few), diloco(few, short), diloco(few, middle), SYNC, DELAYED, OVERLAPPED, ACCO]
    second = [ONE, times_batch(few), diloco(few, long), times_batch(many), *(diloco(many, length) for length in plan.lengths)]
    for name, shown in (("plot.png", first), ("many_islands.png", second)):
        drawn = {label: outcomes[label] for label in shown if label in outcomes and outcomes[label].curves}
        save_figure(costs_figure, drawn, folder / name)
    rounds = {label: outcomes[label] for label in outcomes if label.startswith("DiLoCo, k=") and any(outcomes[label].deltas)}
    save_figure(deltas_figure, rounds, folder / "deltas.png")
    return {
        "plot.png": "loss against tokens, virtual time and bytes",
        "many_islands.png": f"the same with {many} islands, and in rounds of {long} steps",
        "deltas.png": "cosines and norms of the islands' deltas over a run, means and ranges over seeds",
    }


# ---------------------------------------------------------------------------------------------------------------------- report


def introduction(study: Study) -> str:
    """The workload in words, from the plan and the text's facts."""
    plan, text, one = study.plan, study.text, study.outcomes[ONE]
    params, tokens = one.mean("params") or 0.0, one.tokens or 0.0
    batch = plan.batch_size * plan.seq_len
    return (
        f"{figure_text.decoder_text(one)} reads a text of {human_count(text['train']['tokens'])} tokens with a vocabulary of "
        f"{text['vocab_size']:,}, in batches of {plan.batch_size} sequences of {plan.seq_len} tokens per island ({batch:,} "
        f"tokens). All rows start from the same {plan.warm_start:,} steps of one worker (with Muon, where Muon follows), "
        f"and then take {plan.steps:,} steps. One "
        f"worker reads {tokens / params if params else 0:.0f} tokens a parameter. The inner rule is AdamW with betas of 0.9 and "
        f"0.95, a warm-up of {plan.warmup} steps, a cosine to a tenth of the peak, and clipping at 1. Each method has the inner "
        f"rate and the outer rule that ended lowest on a seed that is not reported, with {plan.islands} islands and rounds of "
        f"{plan.lengths[0]} steps. The validation text has {human_count(plan.eval_batches * batch)} tokens of held-out documents. "
        f"Times and links are virtual."
    )


def report(study: Study) -> list[str]:
    """All sections."""
    if ONE not in study.outcomes:
        left = "No row of the tables was run yet: the same command with `--record` continues."
        return [f"## Choices\n\n{choices_table(study)}", left]
    groups, alone = rows_of.headline(study.plan, study.choices), rows_of.one_seed(study.plan, study.choices)
    others, first = rows_of.exchanges(study.plan, study.choices), study.seeds[:1]
    missing = [("The papers' tables", groups, study.seeds), ("Tables with one seed", alone, first)]
    missing.append(("Smaller exchanges, and Muon", others, study.seeds))
    sections = [f"## Headline claims\n\n{rules_text(study)}\n\n{claims_table(study, headline_claims(study))}"]
    sections += [f"## Setting\n\n{introduction(study)}", f"## What was not run\n\n{bullets(missing_lines(study, missing))}"]
    sections += [f"## Choices\n\n{choices_table(study)}", f"## Does a larger batch still pay?\n\n{bullets(gate_lines(study))}"]
    noise = noise_text(study)
    sections.append(f"## Further claims\n\n{claims_table(study, further_claims(study))}" + (f"\n\n{noise}" if noise else ""))
    sections += [f"## {group.title}\n\n{table(study, group, len(study.seeds))}" for group in (*groups, *others)]
    if lines := deltas_lines(study):
        sections.append(f"## How alike the islands' deltas are\n\n{deltas_table(study)}\n\n{bullets(lines)}")
    if reached := reach_tables(study.plan, study.outcomes, len(study.seeds)):
        sections.append("\n\n".join(["## Time to a loss", REACH_RULE, *reached]))
    sections.append("The tables below have one seed (†), unless a row names more.")
    run = [group for group in alone if any(label in study.outcomes for label in group.rows)]
    sections += ["\n\n".join(filter(None, [f"## {group.title}", group.note, table(study, group, 1)])) for group in run]
    if left := [f"{group.title}: {', '.join(f'`{label}`' for label in group.rows)}" for group in alone if group not in run]:
        sections.append(f"## Tables of which no row was run\n\nFor want of device time.\n\n{bullets(left)}")
    return sections


def brief_table(study: Study) -> str:
    """The README's table: a headline row per method, its regime, and the verdicts on its difference from a row."""
    plan, outcomes = study.plan, study.outcomes
    k, many, short, long = plan.islands, plan.many, plan.lengths[0], plan.lengths[-1]
    rounds = {length: f"{plan.steps // length} rounds of {length} steps" for length in (short, long)}
    shown: dict[str, tuple[str, str, str | None]] = {
        ONE: ("one worker", f"{plan.steps:,} steps", None),
        times_batch(k): (f"{k} times the batch (DDP)", f"{plan.steps:,} exchanges", None),
        diloco(k, short): (f"DiLoCo, {k} islands", rounds[short], times_batch(k)),
        diloco(k, long): (f"DiLoCo, {k} islands", rounds[long], times_batch(k)),
        times_batch(many): (f"{many} times the batch (DDP)", f"{plan.steps:,} exchanges", None),
        diloco(many, short): (f"DiLoCo, {many} islands", rounds[short], times_batch(many)),
        DELAYED: ("asynchronous: Delayed Nesterov, Dynamic Local Updates", f"{k} workers of 0.58 to 3.33 s a step", SYNC),
        ACCO: ("ACCO", _link_text(study), OVERLAPPED),
    }
    rows = []
    for label, (description, regime, other) in shown.items():
        if label not in outcomes or (other is not None and other not in outcomes):
            continue
        outcome, compared, verdicts = outcomes[label], "-", ["-", "-"]
        if other is not None:
            compared = f"{compared_text(study, label, other)} from {_reference(study, other)}"
            claims = [lower("", label, other), Claim(text="", terms=((1.0, label), (-1.0, other)), below=CLOSE)]
            batch = next((islands for islands in plan.counts if other == times_batch(islands)), None)
            gated = batch is not None and not study.judged(batch)
            verdicts = ["**not judged here**" if gated else verdict(study, claim) for claim in claims]
            verdicts[0] = "-" if label == ACCO else verdicts[0]
        sent = outcome.mean("sent_bytes_per_island")
        costs = ["-" if sent is None else human_bytes(sent), figure_text.time_text(outcome)]
        rows.append([description, regime, figure_text.loss_text(outcome)[0], compared, *verdicts, *costs])
    compared_with = ["difference from another row", "below that row", f"at most {CLOSE:g} above that row"]
    headings = ["method", "regime", "validation loss", *compared_with, "sent per island", "virtual time"]
    return f"{markdown_table(headings, rows, left=2)}\n\n{_brief_note(study)}"


def _link_text(study: Study) -> str:
    """The link of ACCO's row, and what the row gains over it."""
    share = exchange_share(study)
    link = "" if share is None else f"an exchange takes {share:.3f} of a batch's time; ACCO gains most near half"
    if not {ACCO, OVERLAPPED} <= study.outcomes.keys():
        return link
    return f"{link}: {figure_text.time_ratio_text(study.outcomes[ACCO], study.outcomes[OVERLAPPED])} of DDP's time"


def _reference(study: Study, label: str) -> str:
    if label == SYNC:
        return f"DiLoCo, which waits for the slowest ({figure_text.time_text(study.outcomes[label])})"
    if label == OVERLAPPED:
        return f"DDP that exchanges during the backward pass ({figure_text.time_text(study.outcomes[label])})"
    return label.replace("x batch", " times the batch")


def _brief_note(study: Study) -> str:
    """What the rows of the README's table share."""
    plan, one = study.plan, study.outcomes[ONE]
    rule = _rule(study.choices[rows_of.DILOCO].outer)
    shares = {islands: 100 * CLOSE / gained for islands in plan.counts if (gained := study.gain(islands))}
    shown = " and ".join(f"{share:.0f} % of what {islands} times the batch gains" for islands, share in shares.items())
    margin = f" {CLOSE:g} is {shown} over one worker." if shown else ""
    return (
        f"{figure_text.decoder_text(one)}, batches of {plan.batch_size * plan.seq_len:,} tokens per island, {len(study.seeds)} "
        f"seeds, each method at its best of three inner rates; DiLoCo's outer rule is {rule} (learning rate/momentum), the best of "
        f'three. {NOTATION} {INTERVAL_RULE} The papers claim "below".{margin} {EDGE_RULE}'
    )


def differences_table(study: Study) -> str:
    """The differences of the headline's rows, for a study with one seed."""
    rows = [
        [label, other, compared_text(study, label, other)]
        for group in rows_of.headline(study.plan, study.choices)
        for label, other in group.against.items()
        if label in study.outcomes and compared_text(study, label, other) != "-"
    ]
    shown = markdown_table(["row", "compared with", "difference"], rows, left=2)
    rules = ", ".join(
        f"`{method}` {_rule(choice.outer)}"
        for method, choice in study.choices.items()
        if len(choices_of.outers_of(study.plan, method)) > 1
    )
    rates = ", ".join(f"`{method}`" for method in sorted(study.edge))
    return f"{shown}\n\nOuter rules: {rules}. At the edge of the rates that were tried: {rates}."
