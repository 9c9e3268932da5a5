"""What the rules and schedules refuse: numbers with which they could not work."""

from __future__ import annotations

from atoll.core.errors import ConfigError

_FLOAT32_MAX = 3.4e38


def at_least_zero(name: str, value: float) -> None:
    """Refuse what cannot be a rate or a small constant."""
    if not 0 <= value < _FLOAT32_MAX:
        raise ConfigError(f"{name}={value} must be a number of at least 0 that fits into float32. Use 0 to switch it off.")


def below_one(name: str, value: float) -> None:
    """Refuse what cannot be the share of an average that is kept."""
    if not 0 <= value < 1:
        raise ConfigError(f"{name}={value} is outside [0, 1): what is kept would never fade. 0.9 is usual, 0 keeps nothing.")
