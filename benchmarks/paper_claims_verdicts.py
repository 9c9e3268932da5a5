"""The verdicts of `paper_claims.py`: each claim of a paper as a difference between two rows, judged in the paper's direction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import Any

import figure_text
import paper_claims_choices as choices_of
import paper_claims_rows as rows_of
from ablations import ONE_SEED, Group
from atoll.runs.cluster import all_reduce_cost, step_times
from cells import Outcome
from claims import (
    GATE,
    INTERVAL_RULE,
    NOT_HERE,
    UNEQUAL_START,
    Claim,
    costs,
    few_seeds,
    gain,
    gate_reason,
    higher,
    lower,
    mean_difference,
    unequal_start,
)
from paper_claims_rows import (
    ACCO,
    BUFFER,
    DELAYED,
    DPU,
    NAIVE,
    ONE,
    OVERLAPPED,
    SYNC,
    WP,
    Choice,
    Plan,
    diloco,
    times_batch,
    times_updates,
)
from record import bullets, markdown_table
from seed_statistics import Interval, Sample, difference, scatter, t_quantile

CLOSE = 0.02
"""Nats. The second column of verdicts: whether the first row ends at most this much above the second."""
LEAST_SEEDS = 3
"""Fewer give neither a verdict nor an interval: with two, both rest on one difference."""
FAVOURED, BOTH_EDGES = " (edge)", " (both edges)"
"""Mark a verdict that an edge of the grid of rates favours, and one on two rows that both have their rate at an edge."""
NOTATION = (
    "± is the sample standard deviation over seeds. [a, b] is the 95 % interval of a difference, taken seed by seed (Student's t)."
)
EDGE_RULE = (
    "(edge): a rate that was not tried may change the verdict, since the row whose lower loss would change it has its best rate at "
    "an end of the rates that were tried. (both edges): both rows have, so rates beyond may change the verdict or confirm it."
)
NO_TIME = "not run: device time"
"""What stands in the place of a row's loss: the time on the device ended before its cell."""

Outcomes = Mapping[str, Outcome]
_PPL = "perplexity {} against {}"
"""The figure of the row that the claim is about, then of the row that it is compared with."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What was run, and what the tables are made of."""

    plan: Plan
    choices: Mapping[str, Choice]
    tried: Outcomes  # the candidates that methods chose from
    outcomes: Outcomes  # by label, the rows that have cells
    text: Mapping[str, Any]  # facts about the prepared text
    seeds: tuple[int, ...]

    @property
    def edge(self) -> frozenset[str]:
        """The methods whose rate is at the edge of those that were tried."""
        return choices_of.at_edge(self.plan, self.tried, self.choices)

    def gain(self, islands: int) -> float | None:
        """What k times the batch gains over one worker, in nats; None if one of them was not run."""
        return gain(self.outcomes, ONE, times_batch(islands))

    def judged(self, islands: int) -> bool:
        """Whether claims about this larger batch are judged."""
        return self.open(gate_of(islands))

    def open(self, gate: tuple[str, str] | None) -> bool:
        """Whether claims with this gate are judged."""
        return gate is None or (gate_reason(gate, self.outcomes) is None and not start_differs(self.outcomes, *gate))


def gate_of(islands: int) -> tuple[str, str]:
    """The gate of claims about so many times the batch."""
    return ONE, times_batch(islands)


def start_differs(outcomes: Outcomes, one: str, other: str) -> bool:
    """Whether two rows whose warm starts have the same settings began with other weights in a seed that both have. So it is if a
    record is continued without its folder of warm starts: on a GPU no two have the same bits."""
    rows = [outcomes[label] for label in (one, other)]
    runs = [row.row.run(0) for row in rows]
    starts = [(run.model, type(run.optimizer), run.train.warm_start_steps, run.train.warm_start_lr) for run in runs]
    return starts[0] == starts[1] and unequal_start(rows)


@dataclass(frozen=True, kw_only=True)
class Tested:
    """A paper's claim about two rows.

    Attributes:
        claim: in the paper's direction, or with the paper's bound; None: the paper has figures in both directions.
        terms: labels of the two rows.
        paper: the paper's own figures.
        regime: where it was tried here.
        near: also judge whether the first row ends at most this much above the second; None: only the paper's direction.
    """

    text: str
    claim: Claim | None
    terms: tuple[str, str]
    paper: str
    regime: str
    near: float | None = None


def _tested(claim: Claim, paper: str, regime: str, *, near: float | None = None) -> Tested:
    (_, one), (_, other) = claim.terms
    return Tested(text=claim.text, claim=claim, terms=(one, other), paper=paper, regime=regime, near=near)


# ------------------------------------------------------------------------------------------------------------------ the claims


def headline_claims(study: Study) -> list[Tested]:
    """The three papers' headline claims."""
    plan = study.plan
    k, many, short, long = plan.islands, plan.many, plan.lengths[0], plan.lengths[-1]
    return [
        *(_against_batch(study, islands, length) for islands, length in ((k, short), (k, long), (many, short), (many, long))),
        _below_one(study, many, long),
        *_hub_claims(study)[:2],
        *_overlap_claims(study)[:2],
    ]


def further_claims(study: Study) -> list[Tested]:
    """All other claims."""
    plan = study.plan
    short, long = plan.lengths[0], plan.lengths[-1]
    headline = {each.terms for each in headline_claims(study)}
    every = [_against_batch(study, islands, length) for islands in plan.counts for length in plan.lengths]
    every += [_below_one(study, islands, length) for islands in plan.counts for length in plan.lengths]
    for islands in plan.counts:
        text = f"DiLoCo: {islands} times the updates end below DiLoCo with H={short}"
        claim = lower(text, times_updates(islands), diloco(islands, short))
        every.append(_tested(claim, _PPL.format("14.72", "15.02"), _rounds(plan, islands, short)))
    more = lower(f"DiLoCo: {plan.many} islands end below {plan.islands}", diloco(plan.many, short), diloco(plan.islands, short))
    every.append(_tested(more, _PPL.format("15.08", "15.23"), f"rounds of {short} steps"))
    rare = costs(
        f"DiLoCo: H={long} costs at most 2.9 % of perplexity to H={short}",
        diloco(plan.islands, long),
        diloco(plan.islands, short),
        2.9,
    )
    every.append(_tested(rare, "2.9 % from H=50 to 1,000", _rounds(plan, plan.islands, long)))
    every += [*_hub_claims(study), *_overlap_claims(study), *_exchange_claims(plan)]
    return [each for each in every if each.terms not in headline]


def _rounds(plan: Plan, islands: int, length: int) -> str:
    return f"{islands} islands, {plan.steps // length} rounds of {length} steps"


def _against_batch(study: Study, islands: int, length: int) -> Tested:
    text = f"DiLoCo, k={islands}, H={length}: below {islands} times the batch"
    claim = lower(text, diloco(islands, length), times_batch(islands), gate_of(islands))
    gained = study.gain(islands)
    regime = _rounds(study.plan, islands, length) + ("" if gained is None else f"; the larger batch gains {gained:.3f}")
    return _tested(claim, _PPL.format("15.02", "15.30") + ", 8 islands, 128 rounds of 500", regime, near=CLOSE)


def _below_one(study: Study, islands: int, length: int) -> Tested:
    claim = lower(f"DiLoCo, k={islands}, H={length}: below one worker", diloco(islands, length), ONE)
    return _tested(claim, _PPL.format("15.02", "16.23"), _rounds(study.plan, islands, length))


def _hub_claims(study: Study) -> list[Tested]:
    plan, batch = study.plan, times_batch(study.plan.islands)
    regime = f"{plan.islands} workers of 0.58 to 3.33 s a step, rounds of {plan.lengths[0]} steps, a window of {plan.grace_s:g} s"
    shared = _share(study, DELAYED, SYNC)
    name = "Asynchronous (Delayed Nesterov, Dynamic Local Updates)"
    return [
        _tested(lower(f"{name}: below synchronous", DELAYED, SYNC), _PPL.format("41.13", "41.35"), regime + shared, near=CLOSE),
        _tested(lower(f"{name}: below a naive hub", DELAYED, NAIVE), _PPL.format("41.13", "44.27"), regime),
        _tested(
            lower(f"{name}: below {plan.islands} times the batch", DELAYED, batch, gate_of(plan.islands)),
            _PPL.format("41.13", "42.47"),
            regime,
            near=CLOSE,
        ),
        _tested(lower(f"{name}: below a buffer of k arrivals", DELAYED, BUFFER), "figure 8", regime),
    ]


def _overlap_claims(study: Study) -> list[Tested]:
    plan = study.plan
    regime = (
        f"{plan.islands} islands, {plan.steps:,} updates of {plan.islands * plan.batch_size * plan.seq_len:,} tokens, "
        f"{plan.overlap_mbit_per_s:g} Mbit/s{_exchange_share(study)}"
    )
    both = _PPL.format("24.2", "24.3") + " on 8 GPUs, 22.5 against 21.7 on 32"
    text = "ACCO: as good as data-parallel training"
    same = Tested(
        text=text, claim=None, terms=(ACCO, OVERLAPPED), paper=both, regime=regime + _share(study, ACCO, OVERLAPPED), near=CLOSE
    )
    return [
        same,
        _tested(lower("ACCO: below delayed updates", ACCO, DPU), "a gap that a warm-up does not close", regime),
        _tested(lower("ACCO: below weight prediction", ACCO, WP), "figure 5", regime),
    ]


def _exchange_share(study: Study) -> str:
    """The same in words."""
    share = exchange_share(study)
    return "" if share is None else f": an exchange takes {share:.3f} of a batch's time"


def exchange_share(study: Study) -> float | None:
    """The time of one exchange of all gradients over the links of ACCO's rows, latencies included, over the time of a batch."""
    params = study.outcomes[OVERLAPPED].mean("params") if OVERLAPPED in study.outcomes else None
    if params is None:
        return None
    cluster = study.outcomes[OVERLAPPED].row.run(0).cluster
    links = [cluster.link_of(island) for island in range(cluster.islands)]
    return all_reduce_cost(int(params), 4, links, cluster.topology).seconds / step_times(cluster.step_time_s)[0]


def _share(study: Study, one: str, other: str) -> str:
    share = time_share(study, one, other)
    return "" if share is None else f"; {share:.3f} of the time"


def time_share(study: Study, one: str, other: str) -> float | None:
    """The virtual time of a row over another's; None if one was not run."""
    if not {one, other} <= study.outcomes.keys():
        return None
    return figure_text.time_ratio(study.outcomes[one], study.outcomes[other])


def _exchange_claims(plan: Plan) -> list[Tested]:
    regime, dense = f"{_rounds(plan, plan.islands, plan.lengths[0])}, {plan.exchange_mbit_per_s:g} Mbit/s", rows_of.DENSE
    near = {rows_of.streaming(overlap): CLOSE for overlap in plan.overlaps} | {rows_of.streaming(plan.overlaps[-1], "int4"): CLOSE}
    near |= {"DiLoCo, int4": 0.005, rows_of.EAGER: 0.03}
    limits = [
        Claim(text=f"{label}: at most {limit:g} above DiLoCo", terms=((1.0, label), (-1.0, dense)), below=limit)
        for label, limit in near.items()
    ]
    below = [
        lower("SparseLoCo: below DiLoCo in fp32", rows_of.SPARSE, dense),
        lower("DiLoCo, int2: below the same without feedback", "DiLoCo, int2", "DiLoCo, int2, no feedback"),
        lower("DiLoCo with Muon inside: below DiLoCo with AdamW inside", rows_of.MUON, dense),
    ]
    muon = "DiLoCo with Muon inside: below data-parallel training with Muon"
    # One worker has AdamW inside: what Muon gains over it counts against the gate.
    batch = lower(muon, rows_of.MUON, rows_of.MUON_BATCH, (ONE, rows_of.MUON_BATCH))
    return [*(_tested(claim, "-", regime) for claim in (*limits, *below)), _tested(batch, "-", regime, near=CLOSE)]


# -------------------------------------------------------------------------------------------------------------------- verdicts


def verdict(study: Study, claim: Claim) -> str:
    """On the difference of two rows that were run."""
    (_, one), (_, other) = claim.terms
    mine, its = study.outcomes[one].loss, study.outcomes[other].loss
    if mine is None or its is None:
        return "**diverged**"
    if start_differs(study.outcomes, one, other):
        return f"**not judged: {UNEQUAL_START}**"
    seeds, found = min(len(mine.values), len(its.values)), difference(mine, its)
    none = few_seeds(seeds, LEAST_SEEDS)
    if none is not None or found is None:
        return f"**{none}**"
    judged = claim.judge(found)
    return f"**{judged}**{_edge_mark(study, claim, judged)}"


def _edge_mark(study: Study, claim: Claim, judged: str) -> str:
    """Whether rates beyond those that were tried could only weaken the verdict, since the row that it is against is at the edge of
    its rates and the other is not; or could change it in both directions, since both are."""
    (_, one), (_, other) = claim.terms
    low, high = (one, other) if claim.below < math.inf else (other, one)
    if judged not in ("holds here", "does not hold here"):
        return ""
    against, favoured = (high, low) if judged == "holds here" else (low, high)
    if rows_of.method_of(against) not in study.edge:
        return ""
    return BOTH_EDGES if rows_of.method_of(favoured) in study.edge else FAVOURED


def fewer_text(outcome: Outcome, seeds: int) -> str:
    """Marks a row with fewer seeds than the study's; empty if it has all."""
    found = len(outcome.summaries) + len(outcome.errors)
    return ONE_SEED if found == 1 else "" if found == seeds else f" ({found} seeds)"


def difference_text(one: Sample, two: Sample) -> str:
    """With an interval, if there are enough seeds.

    >>> difference_text(Sample((1.0, 1.1)), Sample((1.2, 1.3, 1.4)))
    '-0.2000'
    >>> difference_text(Sample((1.0, 1.1, 1.2)), Sample((1.2, 1.3, 1.4)))
    '-0.2000 [-0.2000, -0.2000]'
    """
    found = difference(one, two)
    if found is None or min(len(one.values), len(two.values)) < LEAST_SEEDS:
        return f"{mean_difference(one, two):+.4f}"
    return figure_text.interval_text(found)


def compared_text(study: Study, one: str, other: str | None) -> str:
    """The difference of two rows; a dash if one was not run, or both are the same run."""
    rows = study.outcomes
    if other is None or other not in rows or rows[one].row.run(0) == rows[other].row.run(0):
        return "-"
    mine, its = rows[one].loss, rows[other].loss
    if mine is None or its is None:
        return "-"
    return difference_text(mine, its) + (f" ({UNEQUAL_START})" if start_differs(rows, one, other) else "")


def kept_text(study: Study, label: str, gate: tuple[str, str] | None) -> str:
    """The share of the larger batch's gain over one worker that a row has."""
    if gate is None:
        return "-"
    whole, part = gain(study.outcomes, *gate), gain(study.outcomes, gate[0], label)
    return "-" if not whole or part is None else f"{part / whole:.2f}"


def verdicts_of(study: Study, each: Tested) -> tuple[str, str]:
    """In the paper's direction, and within the margin; a dash where there is none."""
    if each.claim is not None and not study.open(each.claim.gate):
        return f"**{NOT_HERE}**", f"**{NOT_HERE}**"
    strict, margin = (verdict(study, claim) if claim else "-" for claim in (each.claim, _margin(each)))
    return strict, margin


def _margin(each: Tested) -> Claim | None:
    """The weaker claim, if there is one."""
    return Claim(text="", terms=((1.0, each.terms[0]), (-1.0, each.terms[1])), below=each.near) if each.near else None


def claims_table(study: Study, tested: Sequence[Tested]) -> str:
    """The claims whose rows were run."""
    lines = []
    for each in tested:
        one, other = each.terms
        if not set(each.terms) <= study.outcomes.keys():
            continue
        gate = None if each.claim is None else each.claim.gate
        kept = kept_text(study, one, gate)
        verdicts = verdicts_of(study, each)
        lines.append([each.text, each.paper, compared_text(study, one, other), *verdicts, kept, each.regime])
    headings = ["claim", "the paper", "difference of loss here", "claim holds", f"at most {CLOSE:g} above"]
    return markdown_table([*headings, "share of the gain", "regime here"], lines, left=7)


def rules_text(study: Study) -> str:
    """How to read the verdicts, as a list."""
    lines = [
        NOTATION,
        f"{INTERVAL_RULE} Fewer than {LEAST_SEEDS} seeds give neither a verdict nor an interval. {figure_text.BY_CHANCE}",
        'The papers\' claims are strict: "below" is a difference below 0. '
        f"The next column judges a weaker claim, that the row ends at most {CLOSE:g} above.",
        "The share of the gain is that of the larger batch over one worker.",
        EDGE_RULE,
        pooled_text(study),
        _unequal_text(study),
    ]
    return bullets(filter(None, lines))


def pooled_text(study: Study) -> str:
    """The verdicts that differ with the scatter of all rows that have enough seeds, in place of that of two; empty without it."""
    losses = {label: loss for label, outcome in study.outcomes.items() if (loss := outcome.loss) is not None}
    pooled = scatter(several := [loss for loss in losses.values() if len(loss.values) == LEAST_SEEDS])
    if pooled is None:
        return ""
    half = t_quantile(pooled.degrees) * pooled.std * math.sqrt(2 / LEAST_SEEDS)
    changed, judged = list[str](), 0
    for each in (*headline_claims(study), *further_claims(study)):
        for claim in filter(None, (each.claim, _margin(each))):
            if not set(each.terms) <= losses.keys() or not study.open(each.claim and each.claim.gate):
                continue
            one, other = (losses[label] for label in each.terms)
            found = difference(one, other)
            if found is None or min(len(one.values), len(other.values)) < LEAST_SEEDS or start_differs(study.outcomes, *each.terms):
                continue
            judged += 1
            if claim.judge(found) != claim.judge(Interval(found.value, found.value - half, found.value + half)):
                changed.append(f"{each.text}{'' if claim is each.claim else f' (at most {CLOSE:g} above)'}")
    differing = f"{len(changed)} differ with it: {'; '.join(changed)}." if changed else "none differs with it."
    return (
        f"Three seeds can agree by chance, and an interval be narrower than the noise of a repetition. The {len(several)} rows "
        f"with {LEAST_SEEDS} seeds have a residual standard deviation of {pooled.std:.5f} after row and seed effects "
        f"({pooled.degrees} degrees of freedom), which gives a difference of two rows a half-width of {half:.4f}. Of {judged} "
        f"verdicts {differing}"
    )


def _unequal_text(study: Study) -> str:
    """That rows began with other weights, if some did."""
    if not any(start_differs(study.outcomes, one, other) for one, other in combinations(study.outcomes, 2)):
        return ""
    return (
        f"{UNEQUAL_START.capitalize()}: the warm starts of two rows have the same settings but other weights in at least one "
        f"seed, since they ran on two machines, or a command continued the record without its folder `warm`. Such rows are not "
        f"judged."
    )


def gate_lines(study: Study) -> list[str]:
    """What each larger batch gains, and whether claims about it are judged."""
    pairs = [(times_batch(islands), ONE) for islands in (*study.plan.counts, study.plan.most)]
    pairs += [(f"{rows_of.LARGE}, {kind}", f"{ONE}, {kind}") for kind in ("half of the steps", "larger model")]
    lines = []
    for batch, one in pairs:
        found = gain(study.outcomes, one, batch)
        if found is not None:
            margin = f" The margin of {CLOSE:g} is {100 * CLOSE / found:.0f} % of that gain." if found > 0 else ""
            decision = f"claims about it are judged.{margin}" if found <= GATE else "**not judged here**."
            if start_differs(study.outcomes, one, batch):
                decision = f"**not judged: {UNEQUAL_START}**."
            lines.append(f"{batch} gains {found:.3f} nats over {one} (the limit is {GATE:g}): {decision}")
    return lines


# ------------------------------------------------------------------------------------------------------- noise, and what is missing


def noise_text(study: Study) -> str:
    """How far rows differ that train the same over other links or at other speeds."""
    k, short = study.plan.islands, study.plan.lengths[0]
    replicates = ((diloco(k, short), SYNC, rows_of.DENSE), (times_batch(k), OVERLAPPED))
    found = []
    for labels in replicates:
        losses = {label: loss.values for label in labels if label in study.outcomes and (loss := study.outcomes[label].loss)}
        pairs = [pair for pair in combinations(losses, 2) if not start_differs(study.outcomes, *pair)]
        found += [abs(a - b) for one, two in pairs for a, b in zip(losses[one], losses[two], strict=False)]
    if not found:
        return ""
    rows = " and ".join(", ".join(f"`{label}`" for label in labels) for labels in replicates)
    return (
        f"Rows that train the same over other links measure the noise of a repetition: {rows}. With the same seed they differ by "
        f"up to {max(found):.4f} ({len(found)} pairs, mean {fmean(found):.4f}). A smaller difference is noise."
    )


def missing_lines(study: Study, parts: Sequence[tuple[str, Sequence[Group], Sequence[int]]]) -> list[str]:
    """The cells of each part that were not run, and the rates that were not tried."""
    lines = []
    for title, groups, seeds in parts:
        labels = [label for group in groups for label in group.rows]
        found = [
            len(study.outcomes[label].summaries) + len(study.outcomes[label].errors) if label in study.outcomes else 0
            for label in labels
        ]
        missing = [sum(count <= number for count in found) for number in range(len(seeds))]
        each = ", ".join(f"{count} of {len(labels)} with seed {seed}" for count, seed in zip(missing, seeds, strict=True) if count)
        lines.append(f"{title}: {sum(missing)} cells ({each}): device time." if sum(missing) else f"{title}: none.")
    methods = [*choices_of.untried(study.plan, study.tried)]
    if methods:
        named = ", ".join(f"`{method}`" for method in methods)
        rows = [label for _, groups, _ in parts for group in groups for label in group.rows if rows_of.method_of(label) in methods]
        lines.append(
            f"Rates beyond the edge: {len(methods)} cells ({named}): device time. A method that ends lower there runs its rows "
            f"again: {len(rows)} rows of the tables with several seeds have one of these methods."
        )
    return lines


# ------------------------------------------------------------------------------------------------------------ the islands' deltas


def deltas_table(study: Study) -> str:
    """Figures 10 and 11 of DiLoCo: how alike the islands' deltas are. Means over rounds and seeds."""
    rows = []
    for islands in study.plan.counts:
        for length in study.plan.lengths:
            outcome = study.outcomes.get(diloco(islands, length))
            if outcome is not None and outcome.deltas:
                cosines, ratios = over_seeds(outcome, _cosine), over_seeds(outcome, lambda norm, mean, cosine: mean / norm)
                fifths = ", ".join(f"{over_seeds(_fifth(outcome, at), _cosine).mean:.2f}" for at in (0.0, 0.5, 1.0))
                shown = [f"{cosines.mean:.2f}", fifths, f"{ratios.mean:.2f}", f"{islands**-0.5:.2f}"]
                rows.append([diloco(islands, length), *shown])
    headings = [
        "row",
        "mean cosine",
        "in the first, middle and last fifth of the rounds",
        "norm of the mean over mean norm",
        "1/sqrt(k)",
    ]
    return markdown_table(headings, rows)


def _cosine(norm: float, mean: float, cosine: float) -> float:
    return cosine


def _fifth(outcome: Outcome, at: float) -> Outcome:
    """A fifth of a row's rounds, at least one: the first at 0, the last at 1."""
    deltas = []
    for rounds in outcome.deltas:
        count = max(1, len(rounds) // 5)
        start = int(at * (len(rounds) - count))
        deltas.append(rounds[start : start + count])
    return replace(outcome, deltas=tuple(deltas))


def over_seeds(outcome: Outcome, figure: Callable[[float, float, float], float]) -> Sample:
    """A figure of the deltas (mean norm, norm of the mean, mean cosine), mean over rounds, by seed."""
    return Sample(
        tuple(
            fmean(figure(norm, mean, cosine) for _, norm, mean, cosine in rounds if cosine is not None) for rounds in outcome.deltas
        )
    )


def deltas_lines(study: Study) -> list[str]:
    """Whether longer rounds make the deltas more alike, and more islands less."""
    k, many, short, lengths = study.plan.islands, study.plan.many, study.plan.lengths[0], study.plan.lengths
    longer = [("more", higher("", diloco(at, long), diloco(at, short))) for at in (k, many) for long in lengths[1:]]
    fewer = [("less", lower("", diloco(many, length), diloco(k, length))) for length in lengths]
    return [line for word, claim in (*longer, *fewer) if (line := _deltas_line(study, word, claim)) is not None]


def _deltas_line(study: Study, word: str, claim: Claim) -> str | None:
    """The verdict on the cosines of two rows; None if one has no deltas."""
    (_, one), (_, other) = claim.terms
    if not {one, other} <= study.outcomes.keys() or not (study.outcomes[one].deltas and study.outcomes[other].deltas):
        return None
    samples = [over_seeds(study.outcomes[label], _cosine) for label in (one, other)]
    found = difference(*samples)
    none = few_seeds(min(len(sample.values) for sample in samples), LEAST_SEEDS)
    judged = none if none is not None or found is None else claim.judge(found)
    judged = f"not judged: {UNEQUAL_START}" if start_differs(study.outcomes, one, other) else judged
    return f"**{judged}**: the deltas of {one} are {word} alike than those of {other}: cosine {difference_text(*samples)}."
