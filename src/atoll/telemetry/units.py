"""How figures are written: for people with a unit and three significant digits, for JSON as plain values.

Units are decimal (1 kB is 1000 bytes), as in the data sheets of network links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_COUNTS = ("", "k", "M", "B", "T")


@dataclass(frozen=True, kw_only=True)
class JsonRecord:
    """Base of the summaries. `to_dict` has each field, then each property named in `derived`; a field that is None by default is
    left out while it is None."""

    derived: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        optional = {field.name for field in fields(self) if field.default is None}
        values = {name: getattr(self, name) for name in (*(field.name for field in fields(self)), *self.derived)}
        return {name: json_value(value) for name, value in values.items() if value is not None or name not in optional}


def human_bytes(size_bytes: float) -> str:
    """Bytes with a decimal unit.

    >>> [human_bytes(size) for size in (0, 999, 1000, 1_234_567, 999_999, 2.5e12)]
    ['0 B', '999 B', '1.00 kB', '1.23 MB', '1.00 MB', '2.50 TB']
    """
    return _scaled(size_bytes, _BYTES)


def human_count(count: float) -> str:
    """A count of tokens, parameters or steps: k for thousands, M for millions, B for billions, T for trillions.

    >>> [human_count(count) for count in (0, 512, 20_480, 1_310_720, 7e9)]
    ['0', '512', '20.5 k', '1.31 M', '7.00 B']
    """
    return _scaled(count, _COUNTS)


def human_time(time_s: float) -> str:
    """Seconds as h:mm:ss. Times below a minute have decimals, because a simulated run may take less than a second.

    >>> [human_time(time_s) for time_s in (0, 0.0834, 12.34, 59.96, 754, 3599.7, 90_000)]
    ['0:00:00', '0:00:00.083', '0:00:12.3', '0:01:00', '0:12:34', '1:00:00', '25:00:00']
    """
    if not math.isfinite(time_s):
        return _not_finite(time_s)
    sign, time_s = ("-", -time_s) if time_s < 0 else ("", time_s)
    decimals = 3 if 0 < time_s < 9.9995 else 1 if 0 < time_s < 59.95 else 0
    ticks = round(time_s * 10**decimals)  # whole ticks, so that 59.96 carries into the minute
    whole, fraction = divmod(ticks, 10**decimals)
    minutes, seconds = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{sign}{hours}:{minutes:02}:{seconds:02}" + (f".{fraction:0{decimals}}" if decimals else "")


def human_percent(fraction: float) -> str:
    """
    >>> human_percent(0.934), human_percent(1.0), human_percent(0.0042)
    ('93 %', '100 %', '0.42 %')
    """
    if not math.isfinite(fraction):
        return _not_finite(fraction)
    percent = 100 * fraction
    return f"{percent:.0f} %" if abs(percent) >= 9.95 or percent == 0 else f"{percent:.2g} %"


def human_share(part: float | None, whole: float) -> str:
    """The part as a percentage of the whole; "-" where either is missing.

    >>> human_share(1.0, 4.0), human_share(None, 4.0), human_share(1.0, 0.0)
    ('25 %', '-', '-')
    """
    return human_percent(part / whole) if part is not None and whole else "-"


def human_times(ratio: float) -> str:
    """A ratio, as the number before "times".

    >>> [human_times(ratio) for ratio in (1.07, 2.0, 19.96, 128.4, 12_800)]
    ['1.07', '2', '20', '128', '12800']
    """
    if not math.isfinite(ratio):
        return _not_finite(ratio)
    digits = f"{ratio:.0f}" if abs(ratio) >= 99.5 else f"{ratio:.3g}" if abs(ratio) < 9.995 else f"{ratio:.1f}"
    return digits.removesuffix(".0")


def human_fraction(ratio: float) -> str:
    """A ratio below one: 1/n where that is within 2 % of the ratio, else two decimals.

    >>> [human_fraction(ratio) for ratio in (0.05, 0.0502, 0.61, 1 / 3, 0.002, 0.96, 0.998)]
    ['1/20', '1/20', '0.61', '1/3', '1/500', '0.96', '0.998']
    """
    if ratio <= 0 or ratio >= 1:
        return human_times(ratio)
    if 1 / ratio > 1.8 and abs(round(1 / ratio) * ratio - 1) < 0.02:
        return f"1/{round(1 / ratio)}"
    return f"{ratio:.2f}" if 0.01 <= ratio < 0.995 else f"{ratio:.3g}"


def human_loss(loss: float, digits: int = 3) -> str:
    """A loss with that many significant digits, trailing zeros included.

    >>> human_loss(2.3), human_loss(10.826), human_loss(2.3456, digits=4), human_loss(float("nan"))
    ('2.30', '10.8', '2.346', 'NaN')
    """
    return f"{loss:#.{digits}g}".removesuffix(".") if math.isfinite(loss) else _not_finite(loss)


def plural(count: int, noun: str) -> str:
    """
    >>> plural(1, "round"), plural(2400, "exchange")
    ('1 round', '2.40 k exchanges')
    """
    return f"{human_count(count)} {noun}" + ("s" if count != 1 else "")


def perplexity(loss: float) -> float:
    """The exponential of a loss in nats; infinite where that overflows.

    >>> perplexity(0.0), perplexity(1e6)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _scaled(value: float, units: tuple[str, ...]) -> str:
    """Three significant digits and a unit; whole numbers below 1000 stay whole."""
    if not math.isfinite(value):
        return _not_finite(value)
    if abs(value) < 999.5:
        digits = f"{value:.0f}" if value == round(value) else f"{value:.3g}"
        return f"{digits} {units[0]}".strip()
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:  # the rounded value counts: 999 999 is 1.00 M, not 1000 k
        value, power = value / 1000, power + 1
    digits = f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"
    return f"{digits} {units[power]}"


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "infinite" if value > 0 else "-infinite"


def json_value(value: Any) -> Any:
    """A plain JSON value; NaN and infinity as strings, because JSON has neither."""
    if isinstance(value, JsonRecord):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
