"""The DiLoCo paper's ablations on one small workload, and which of its claims hold there.

    python benchmarks/diloco_ablations.py                       all of them, three seeds: about ten minutes on two cores
    python benchmarks/diloco_ablations.py --only H --only k     some of them
    python benchmarks/diloco_ablations.py --quick               smoke test of all of them

Rows are in `diloco_rows.py`. Tables go into the record and, after a complete run, into docs/diloco.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import figure_text
from ablations import DEFAULT, Group, Study
from atoll.telemetry.plot_style import new_figure, save_figure
from cells import Outcome, seeds_text
from claims import Claim, alike, costs, lower
from diloco_rows import DDP, QUICK, Plan, default_row, groups
from record import script


def claims(plan: Plan) -> list[Claim]:
    """The paper's claims about these rows."""
    shortest, longest = min(plan.lengths), max(plan.lengths)
    few, many = f"k={plan.islands}", f"k={max(plan.counts)}"
    none, times, batch = f"warm {min(plan.warm_starts)}", plan.islands, f"{plan.islands}x batch"
    return [
        lower("More frequent exchanges end lower.", f"H={shortest}", f"H={longest}"),
        costs(f"{longest // shortest} times fewer exchanges cost little (2.9 %).", f"H={longest}", f"H={shortest}", 2.9),
        lower("More islands end lower, at more tokens.", few, "k=1"),
        *_diminishing(few, many),
        lower("Also with shards by k-means, further islands end lower.", f"{many}, k-means", f"{few}, k-means"),
        lower("DiLoCo is better than one worker from scratch (Figure 2).", DEFAULT, "from scratch"),
        costs("Shards by k-means, weighted by examples, cost nothing (-0.4 %; bound 0.5 %).", "k-means, examples", "IID", 0.5),
        *(lower(f"Nesterov is better than {other}.", "Nesterov 0.9, 0.7", other) for other in _OTHER_RULES),
        alike("A cosine of the outer rate ends as a constant one does (similar; bound 1 %).", "outer cosine", DEFAULT, 1.0),
        costs("Losing half of the deltas costs little (2.1 %).", "drop 0.5", "drop 0", 2.1),
        alike("Doubling the islands and halving them end alike (bound 1 %).", "pool: doubling", "pool: halving", 1.0),
        alike("Ramping islands up and ramping them down end alike (bound 1 %).", "pool: ramp up", "pool: ramp down", 1.0),
        lower("More compute ends lower: all islands all along against ramps.", "pool: all along", "pool: ramp up"),
        lower("More compute ends lower: ramps against one island.", "pool: ramp up", "pool: 1 all along"),
        costs("Pruning half of each delta costs little (0.39 %).", "pruned 0.5", "pruned 0", 0.39),
        costs("Pruning three quarters costs little (1.66 %).", "pruned 0.75", "pruned 0", 1.66),
        costs("Training without a warm start costs little (0.1 of 15.02 perplexity, 0.7 %).", none, f"warm {plan.warm_start}", 0.7),
        lower("An outer step helps a single island, without any network.", "k=1", "one worker"),
        *(lower(f"DiLoCo is better than one worker: {size}.", f"{size}, DiLoCo", f"{size}, one worker") for size in _SIZES),
        _grows("The gain over one worker grows with the model (4.33 % at 60M, 7.49 % at 400M).", "small", "large"),
        lower(f"DiLoCo is better than {times} times the batch on one worker (1.8 %).", DEFAULT, batch, ("one worker", batch)),
        lower("DiLoCo is better than data-parallel training on the same tokens (1.8 %).", DEFAULT, "DDP", ("one worker", "DDP")),
        lower(f"{times} times the updates on one worker are better than DiLoCo (2.0 %).", f"{times}x updates", DEFAULT),
    ]


_OTHER_RULES = ("SGD 1.0", "Momentum 0.6, 0.7", "Adam 0.3")
_SIZES = ("small", "medium", "large")


def _diminishing(few: str, many: str) -> list[Claim]:
    """The gain from one island to a few is larger than from a few to many."""
    if few == many:
        return []
    text = "Returns diminish: further islands gain less."
    return [
        lower("Further islands end lower still.", many, few),
        Claim(text=text, terms=((1.0, "k=1"), (-2.0, few), (1.0, many)), above=0.0),
    ]


def _grows(text: str, small: str, large: str) -> Claim:
    gains = ((1.0, f"{large}, one worker"), (-1.0, f"{large}, DiLoCo"), (-1.0, f"{small}, one worker"), (1.0, f"{small}, DiLoCo"))
    return Claim(text=text, terms=gains, above=0.0)


def introduction(plan: Plan, seeds: Sequence[int], default: Outcome) -> str:
    return (
        f"{figure_text.decoder_text(default)} on "
        f"{plan.islands} equal islands: {plan.warm_start} steps of warm start, then {plan.steps} of DiLoCo with "
        f"H={plan.inner_steps}; {seeds_text(seeds)}. The command runs the default. A row adds the settings it shows (a row of "
        f"recipe {DDP} has `algorithm=DDP()` instead):\n\n```\n{default.row.command}\n```\n\n{figure_text.RULE}\n\n"
        f"Tokens include the warm start. If a row has other tokens than the one it is compared with, the verdict has their ratio: "
        f"such a difference is not due to the setting only. Bytes sent are the mean per island."
    )


def plot_lengths(groups: Sequence[Group], outcomes: Mapping[str, Outcome], path: Path) -> str | None:
    """Loss against bytes by round length."""
    group = next((group for group in groups if group.name == "H"), None)
    if group is None:
        return None
    save_figure(_lengths_figure, {label: outcomes[label] for label in group.rows}, path)
    return "loss against bytes"


def _lengths_figure(outcomes: Mapping[str, Outcome]) -> Any:
    figure, (axes,) = new_figure(1)
    for label, outcome in outcomes.items():
        loss, sent = outcome.loss, outcome.mean("sent_bytes_per_island")
        if loss is not None and sent:
            axes.errorbar(sent, loss.mean, yerr=[[loss.mean - loss.low], [loss.high - loss.mean]], fmt="o", color="C0", capsize=3)
            axes.annotate(label, (sent, loss.mean), textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.set(xscale="log", xlabel="bytes sent per island", title="Inner steps per round")
    axes.set_ylabel("validation loss (bars: over seeds)")
    axes.margins(x=0.15)  # labels are to the right of their points
    return figure


STUDY = Study(
    name="diloco_ablations",
    title="DiLoCo's ablations",
    about=__doc__ or "",
    page="diloco.md",
    plan=Plan(),
    quick=QUICK,
    groups=groups,
    standing=lambda plan: {DEFAULT: default_row(plan)},
    introduction=introduction,
    claims=claims,
    plot=plot_lengths,
    share="of all deltas'",
)


def main(arguments: Sequence[str] | None = None) -> None:
    STUDY.main(arguments)


if __name__ == "__main__":
    script(main)
