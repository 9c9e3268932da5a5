"""What the paper on asynchronous Local-SGD says, as inequalities between rows.

Its figures are perplexities after 64,000 steps per worker (Tables 1 to 4); its remedies and pairs are curves, and so words.
"""

from __future__ import annotations

from async_rows import DELAYED, NAIVE, SYNC, Plan, pair
from claims import Claim, alike, costs, gains_little, higher, lower, unlike

_LEVELS = {"none": (41.35, 44.27, 41.27), "slight": (41.35, 44.38, 41.27), "moderate": (41.35, 44.29, 41.09)}
_LEVELS |= {"very": (41.35, 44.27, 41.13)}
_COUNTS = {4: (41.35, 44.27, 41.13), 8: (41.23, 44.23, 41.02), 16: (41.25, 44.23, 40.98)}
_BATCHES = {4: 42.47, 8: 41.28, 16: 40.60}
_LARGE = (24.55, 25.64, 24.53)
"""Perplexities of DiLoCo, of naive, and of Delayed Nesterov with Dynamic Local Updates; a larger batch in place of all three."""
_BOUND = 0.5
"""Per cent within which "no worse" and "no help" are taken."""


def claims(plan: Plan) -> list[Claim]:
    """The paper's claims that the rows can speak to. What is the same row in several tables is claimed once, by its level."""
    places = {level: (f"at the level {level}", _LEVELS[level]) for level in plan.levels}
    places |= {f"k={count}": (f"with {count} workers", _COUNTS[count]) for count in plan.counts if count != plan.islands}
    places["large"] = ("with a larger model", _LARGE)
    return [
        *(_naive_is_worse(label, *place) for label, place in places.items()),
        alike(
            "Equal workers do not mend naive (44.27 at none and at very; bound 1 %).",
            f"{plan.levels[0]}, {NAIVE}",
            f"{plan.levels[-1]}, {NAIVE}",
            1.0,
        ),
        *(_delayed_is_no_worse(label, *place) for label, place in places.items()),
        *(_against_batch(count) for count in plan.counts),
        *remedies(),
        *pairs(),
        alike("c=0.1 ends as c=0 does (41.16 against 41.13; bound 1 %).", "c=0.1", "c=0", 1.0),
    ]


def _naive_is_worse(label: str, where: str, figures: tuple[float, float, float]) -> Claim:
    sync, naive, _ = figures
    return higher(f"Naive is worse than sync {where} ({_against(naive, sync)}).", f"{label}, {NAIVE}", f"{label}, {SYNC}")


def _delayed_is_no_worse(label: str, where: str, figures: tuple[float, float, float]) -> Claim:
    sync, _, delayed = figures
    text = f"{DELAYED} is no worse than sync {where} ({_against(delayed, sync)}; bound {_BOUND} %)."
    return costs(text, f"{label}, {DELAYED}", f"{label}, {SYNC}", _BOUND)


def _against_batch(count: int) -> Claim:
    """Better up to 8 workers; with 16 the larger batch was better."""
    delayed, batch = _COUNTS[count][2], _BATCHES[count]
    better, one, two = delayed < batch, f"k={count}, {DELAYED}", f"k={count}, {count}x batch"
    text = f"{DELAYED} is {'better' if better else 'worse'} than {count} times the batch ({_against(delayed, batch)})."
    return lower(text, one, two) if better else higher(text, one, two)


def _against(one: float, two: float) -> str:
    """
    >>> _against(44.27, 41.35)
    '44.27 against 41.35, +7.1 %'
    """
    return f"{one:.2f} against {two:.2f}, {100 * (one / two - 1):+.1f} %"


def remedies() -> list[Claim]:
    """Of what the paper compares its own with, each on top of naive."""
    known = {"Polynomial": "the polynomial discount", "Polynomial, 10": "the one with a threshold", "compensation": "compensation"}
    return [
        lower("A polynomial discount helps naive (marginally).", "Polynomial", NAIVE),
        gains_little(f"A threshold adds nothing to it (bound {_BOUND} %).", "Polynomial, 10", "Polynomial", _BOUND),
        gains_little(f"Delay compensation does not help naive (bound {_BOUND} %).", "compensation", NAIVE, _BOUND),
        *(lower(f"A buffer is the best known remedy: better than {name}.", "buffer", label) for label, name in known.items()),
        lower("Delayed Nesterov alone is better than a buffer, without DyLU or a window for either.", "DN", "buffer"),
        lower(f"{DELAYED} is better than a buffer with DyLU and the same window.", DELAYED, "buffer+DyLU+window"),
        lower(f"{DELAYED} is better than outer SGD with DyLU and the same window.", DELAYED, "outer SGD+DyLU+window"),
    ]


def pairs() -> list[Claim]:
    """Of inner and outer rules."""
    (sgd, sgd_async), (nesterov, nesterov_async) = pair("AdamW", "SGD"), pair("AdamW", "Nesterov")
    adam, adam_async = pair("AdamW", "Adam")
    others = {"SGD": sgd_async, "momentum": pair("AdamW", "Momentum")[1]}
    return [
        lower("With SGD outside, asynchronous is better than synchronous.", sgd_async, sgd),
        higher("With Nesterov outside, asynchronous is worse than synchronous.", nesterov_async, nesterov),
        lower("Adam outside is poor: Nesterov is better, synchronously.", nesterov, adam),
        lower("Adam outside is poor: Nesterov is better, at every arrival.", nesterov_async, adam_async),
        *(
            alike(f"At every arrival, Nesterov and {name} outside end alike (bound 1 %).", nesterov_async, label, 1.0)
            for name, label in others.items()
        ),
        unlike(lower("AdamW inside is better than SGD inside, under Nesterov.", nesterov, pair("SGD", "Nesterov")[0])),
    ]
