"""The tables, verdicts and plots of `paper_claims.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import figure_text
import paper_claims_rows as rows_of
from ablations import ONE_SEED, Group
from atoll.telemetry.plot_style import COLOURS, new_figure, save_figure
from atoll.telemetry.units import human_bytes, human_count, human_time, human_times
from cells import Outcome
from claims import INTERVAL_RULE, Claim, claim_lines, lower
from paper_claims_rows import ACCO, BUFFER, DELAYED, DPU, FREE, NAIVE, ONE, OVERLAPPED, SYNC, WP, Choice, Plan, diloco, times_batch
from record import bullets, markdown_table
from seed_statistics import Interval, difference

GATE = 0.15
"""Nats. A claim about k times the batch is judged where that batch gains at most this much over one worker: else it is k times the
data, and no method that communicates less can be as good."""
CLOSE = 0.02
"""Nats. Two losses that differ by at most this much count as the same."""

Outcomes = Mapping[str, Outcome]


def gain(outcomes: Outcomes, islands: int) -> float | None:
    """What k times the batch gains over one worker, in nats; None if one of them was not run."""
    one, batch = (outcomes[label].loss if label in outcomes else None for label in (ONE, times_batch(islands)))
    return None if one is None or batch is None else one.mean - batch.mean


def judged(outcomes: Outcomes, islands: int) -> bool:
    """Whether claims about this larger batch are judged."""
    found = gain(outcomes, islands)
    return found is not None and found <= GATE


# --------------------------------------------------------------------------------------------------------------------- tables


def choices_table(plan: Plan, choices: Mapping[str, Choice], tried: Outcomes) -> str:
    """What each method chose, and what it lost elsewhere on the grid."""
    rows = []
    for method in rows_of.METHODS:
        if method not in choices:
            continue
        choice = choices[method]
        has_outer = len(rows_of.outers_of(plan, method)) > 1
        rates = [_tried(tried, method, Choice(rate, choice.outer)) for rate in plan.rates]
        rules = [_tried(tried, method, Choice(plan.rate, rule)) for rule in rows_of.outers_of(plan, method)] if has_outer else ["-"]
        shown = f"{choice.outer[0]:g}/{choice.outer[1]:g}" if has_outer else "-"
        rows.append([method, f"{choice.rate:g}", ", ".join(rates), shown, ", ".join(rules)])
    grids = ", ".join(f"{rate:g}" for rate in plan.rates)
    rules = ", ".join(f"{rate:g}/{momentum:g}" for rate, momentum in plan.outers)
    return markdown_table(["method", "inner rate", f"losses at {grids}", "outer rule", f"losses with {rules}"], rows)


def _tried(tried: Outcomes, method: str, choice: Choice) -> str:
    outcome = tried.get(rows_of.choice_label(method, choice))
    if outcome is None:
        return "-"
    return "diverged" if outcome.loss is None else f"{outcome.loss.mean:.3f}"


def table(group: Group, outcomes: Outcomes, text_tokens: float, *, mark: bool = False) -> str:
    """A group's rows: loss, difference from the row it is compared with, costs, and how often the text was read."""
    rows = []
    for label in group.rows:
        if label not in outcomes:
            rows.append([label, "not run", *["-"] * 6])
            continue
        outcome, other = outcomes[label], group.against.get(label)
        rows.append(
            [
                label + (ONE_SEED if mark else ""),
                _loss(outcome),
                *_compared(outcome, other, outcomes),
                *_costs(outcome, text_tokens),
            ]
        )
        reference = outcomes.get(other) if other is not None else None
        rows[-1].append("-" if reference is None or reference is outcome else figure_text.time_ratio_text(outcome, reference))
    headings = [
        "row",
        "validation loss",
        "compared with",
        "difference",
        "sent per island",
        "text read",
        "virtual time",
        "time, as a share",
    ]
    return markdown_table(headings, rows, left=1)


def _loss(outcome: Outcome) -> str:
    loss = outcome.loss
    if loss is None:
        return figure_text.loss_text(outcome)[0]
    return f"{loss.mean:.3f}" + (f" ± {loss.std:.3f}" if loss.std is not None else "")


def _compared(outcome: Outcome, other: str | None, outcomes: Outcomes) -> list[str]:
    reference = outcomes.get(other) if other is not None else None
    if other is None or reference is None or reference is outcome or outcome.loss is None or reference.loss is None:
        return ["-", "-"]
    found = difference(outcome.loss, reference.loss)
    return [other, short_interval(found) if found is not None else f"{outcome.loss.values[0] - reference.loss.values[0]:+.3f}"]


def short_interval(found: Interval) -> str:
    """
    >>> short_interval(Interval(-0.1, -0.15, -0.05))
    '-0.100 [-0.150, -0.050]'
    """
    return f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def _costs(outcome: Outcome, text_tokens: float) -> list[str]:
    read = "-" if outcome.tokens is None else f"{human_times(outcome.tokens / text_tokens)} times"
    return [figure_text.bytes_text(outcome), read, figure_text.time_text(outcome)]


def gate_lines(plan: Plan, outcomes: Outcomes) -> list[str]:
    """What each larger batch gains, and whether claims about it are judged."""
    lines = []
    for islands in (*plan.counts, plan.most):
        found = gain(outcomes, islands)
        if found is not None:
            decision = "claims about it are judged" if found <= GATE else "**not judged here**"
            lines.append(f"{times_batch(islands)} gains {found:.3f} nats over one worker (the limit is {GATE:g}): {decision}.")
    return lines


# -------------------------------------------------------------------------------------------------------------------- verdicts


def claims(plan: Plan, outcomes: Outcomes) -> list[str]:
    """The verdicts on the papers' headline claims. Claims about a batch that fails the gate say so."""
    lines = []
    for islands in plan.counts:
        batch = times_batch(islands)
        if batch not in outcomes:
            continue
        if not judged(outcomes, islands):
            lines.append(f"**not judged here**: DiLoCo with {islands} islands against {batch}.")
            continue
        for length in plan.lengths:
            label = diloco(islands, length)
            reaches = f"DiLoCo with {islands} islands and rounds of {length} steps ends at most {CLOSE:g} above {batch}."
            lines += claim_lines([Claim(text=reaches, terms=((1.0, label), (-1.0, batch)), below=CLOSE)], outcomes)
    lines += claim_lines([*_below_one(plan), *_hub_claims(), *_overlap_claims()], outcomes)
    return [*lines, *_time_lines(outcomes)]


def _below_one(plan: Plan) -> list[Claim]:
    return [
        lower(f"DiLoCo with {islands} islands and rounds of {length} steps ends below one worker.", diloco(islands, length), ONE)
        for islands in plan.counts
        for length in plan.lengths
    ]


def _hub_claims() -> list[Claim]:
    within = "Delayed Nesterov with Dynamic Local Updates ends at most {} above synchronous training on unequal workers."
    return [
        Claim(text=within.format(CLOSE), terms=((1.0, DELAYED), (-1.0, SYNC)), below=CLOSE),
        lower("It ends below the naive hub.", DELAYED, NAIVE),
        lower("It ends below a buffer of k arrivals.", DELAYED, BUFFER),
    ]


def _overlap_claims() -> list[Claim]:
    same = "{} ends at most {} above data-parallel training at the same number of samples."
    return [
        Claim(text=same.format(ACCO, CLOSE), terms=((1.0, ACCO), (-1.0, OVERLAPPED)), below=CLOSE),
        Claim(text=same.format(FREE, CLOSE), terms=((1.0, FREE), (-1.0, OVERLAPPED)), below=CLOSE),
        lower("ACCO ends below delayed parameter updates.", ACCO, DPU),
        lower("ACCO ends below weight prediction.", ACCO, WP),
    ]


def _time_lines(outcomes: Outcomes) -> list[str]:
    """Times of methods that hide or avoid waiting, as shares of the time of those that do not."""
    lines = []
    for one, other in ((DELAYED, SYNC), (ACCO, OVERLAPPED), (FREE, OVERLAPPED)):
        if one in outcomes and other in outcomes:
            ratio = figure_text.time_ratio(outcomes[one], outcomes[other])
            if ratio is not None:
                lines.append(f"{one} takes {ratio:.3f} of the virtual time of {other}, for the same number of samples.")
    return lines


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


def reach_table(outcomes: Outcomes, rows: Sequence[str], target: str) -> str:
    """Virtual time until each row has the loss at which the target row ends, with a margin."""
    end = outcomes[target].loss
    assert end is not None
    loss = end.mean + CLOSE
    times = {label: reach_time_s(outcomes[label], loss) for label in rows if label in outcomes}
    whole_s = times[target]
    lines = [
        [
            label,
            "never" if time_s is None else human_time(time_s),
            "-" if time_s is None or whole_s is None else f"{time_s / whole_s:.3f}",
        ]
        for label, time_s in times.items()
    ]
    return f"Virtual time until the loss is {loss:.3f}, {CLOSE:g} above the end of {target}:\n\n" + markdown_table(
        ["row", "virtual time", f"over {target}"], lines
    )


# ----------------------------------------------------------------------------------------------------------------------- plots


def save_plots(plan: Plan, outcomes: Outcomes, curves: Path, deltas: Path) -> str:
    """Loss against tokens, virtual time and bytes for the headline; cosines and norms of DiLoCo's deltas over a run. Returns a
    caption; empty if there is nothing to draw."""
    if diloco(plan.islands, plan.lengths[0]) not in outcomes:
        return ""
    shown = [ONE, times_batch(plan.islands), diloco(plan.islands, plan.lengths[0]), diloco(plan.islands, plan.lengths[1])]
    shown += [SYNC, DELAYED, OVERLAPPED, ACCO]
    drawn = {label: outcomes[label] for label in shown if label in outcomes and outcomes[label].curves}
    save_figure(_curves_figure, drawn, curves)
    rounds = {label: outcomes[label] for label in outcomes if label.startswith("DiLoCo, k=") and any(outcomes[label].deltas)}
    save_figure(_deltas_figure, rounds, deltas)
    return "loss against tokens, virtual time and bytes"


def _curves_figure(outcomes: Outcomes) -> Any:
    figure, panels = new_figure(3)
    for colour, (label, outcome) in zip(COLOURS, outcomes.items(), strict=False):
        run = outcome.row.run(0)
        tokens_per_update = run.train.batch_size * run.data.seq_len / 1e6  # type: ignore[union-attr]
        for number, (curve, sent) in enumerate(zip(outcome.curves, outcome.sent, strict=True)):
            losses = [loss for _, _, loss in curve]
            against = (
                [updates * tokens_per_update for _, updates, _ in curve],
                [t / 3600 for t, _, _ in curve],
                [b / 1e6 for b in sent],
            )
            for panel, values in zip(panels, against, strict=True):
                panel.plot(values, losses, color=colour, linewidth=1.3, alpha=0.8, label=None if number else label)
    for panel, name in zip(panels, ("tokens (millions)", "virtual time (hours)", "sent per island (MB)"), strict=True):
        panel.set(xlabel=name, ylabel="validation loss")
    panels[2].set_xscale("symlog")
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def _deltas_figure(outcomes: Outcomes) -> Any:
    figure, (cosines, norms) = new_figure(2)
    for colour, (label, outcome) in zip(COLOURS, outcomes.items(), strict=False):
        rounds = outcome.deltas[0]
        at = [number / max(1, len(rounds) - 1) for number in range(len(rounds))]
        cosines.plot(at, [cosine for _, _, _, cosine in rounds], color=colour, linewidth=1.3, label=label)
        norms.plot(at, [mean for _, _, mean, _ in rounds], color=colour, linewidth=1.3)
    cosines.set(xlabel="share of the run", ylabel="mean cosine of the islands' deltas")
    norms.set(xlabel="share of the run", ylabel="norm of their mean")
    cosines.legend(frameon=False, fontsize=8)
    return figure


# ---------------------------------------------------------------------------------------------------------------------- report


def introduction(plan: Plan, outcomes: Outcomes, text: Mapping[str, Any]) -> str:
    """The workload in words, from the plan and the text's facts."""
    one = outcomes[ONE]
    params, tokens = one.mean("params") or 0.0, one.tokens or 0.0
    batch = plan.batch_size * plan.seq_len
    return (
        f"{figure_text.decoder_text(one)} reads a text of {human_count(text['train']['tokens'])} tokens with a vocabulary of "
        f"{text['vocab_size']:,}, in batches of {plan.batch_size} sequences of {plan.seq_len} tokens per island ({batch:,} "
        f"tokens). All rows start from the same {plan.warm_start:,} steps of one worker, and then take {plan.steps:,} steps. One "
        f"worker reads {tokens / params if params else 0:.0f} tokens a parameter. The inner rule is AdamW with betas of 0.9 and "
        f"0.95, a warm-up of {plan.warmup} steps, a cosine to a tenth of the peak, and clipping at 1. Each method has the inner "
        f"rate and the outer rule that ended lowest on a seed that is not reported, with {plan.islands} islands and rounds of "
        f"{plan.lengths[0]} steps. The validation text has {human_count(plan.eval_batches * batch)} tokens of held-out documents. "
        f"Times and links are virtual."
    )


def report(
    plan: Plan, choices: Mapping[str, Choice], tried: Outcomes, outcomes: Outcomes, text: Mapping[str, Any], seeds: int
) -> list[str]:
    """All sections."""
    if ONE not in outcomes:
        left = "No row of the tables was run yet: the same command with `--record` continues."
        return [f"## Choices\n\n{choices_table(plan, choices, tried)}", left]
    tokens = text["train"]["tokens"]
    sections = [f"## Setting\n\n{introduction(plan, outcomes, text)}", f"## Choices\n\n{choices_table(plan, choices, tried)}"]
    sections.append(f"## Does a larger batch still pay?\n\n{bullets(gate_lines(plan, outcomes))}")
    sections.append(f"## Verdicts\n\n{INTERVAL_RULE} All over {seeds} seeds.\n\n{bullets(claims(plan, outcomes))}")
    for group in rows_of.headline(plan, choices):
        sections.append(f"## {group.title}\n\n{table(group, outcomes, tokens)}")
    if OVERLAPPED in outcomes:
        sections.append(f"## Time to a loss\n\n{reach_table(outcomes, [OVERLAPPED, ACCO, FREE, DPU, WP], OVERLAPPED)}")
    sections.append("The tables below have one seed (†).")
    for group in rows_of.one_seed(plan, choices):
        if any(label in outcomes for label in group.rows):
            sections.append(f"## {group.title}\n\n{table(group, outcomes, tokens, mark=True)}")
        else:
            sections.append(f"## {group.title}\n\nNot run.")
    return sections


def brief_table(plan: Plan, outcomes: Outcomes) -> str:
    """The README's table: a headline row per method."""
    k, length = plan.islands, plan.lengths[0]
    shown = {
        ONE: ("one worker", "-"),
        times_batch(k): (f"{k} times the batch: DDP, exchange every step", ONE),
        diloco(k, length): (f"DiLoCo, {k} islands, exchange every {length} steps", times_batch(k)),
        diloco(plan.many, plan.lengths[1]): (f"DiLoCo, {plan.many} islands, every {plan.lengths[1]} steps", times_batch(plan.many)),
        SYNC: ("unequal workers: DiLoCo, which waits for the slowest", "-"),
        DELAYED: ("unequal workers: Delayed Nesterov, Dynamic Local Updates", SYNC),
        OVERLAPPED: ("DDP that exchanges during the backward pass", "-"),
        ACCO: ("ACCO, the same samples", OVERLAPPED),
    }
    rows = []
    for label, (description, other) in shown.items():
        if label in outcomes:
            outcome = outcomes[label]
            compared = _compared(outcome, other, outcomes)
            sent = outcome.mean("sent_bytes_per_island")
            rows.append(
                [
                    description,
                    _loss(outcome),
                    compared[1],
                    "-" if sent is None else human_bytes(sent),
                    figure_text.time_text(outcome),
                ]
            )
    return markdown_table(
        ["method", "validation loss", "minus the larger batch, or the row above", "sent per island", "virtual time"], rows
    )
