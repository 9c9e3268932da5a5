"""What all islands of a run hold alike: one number tells whether they do, and what they cannot is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.protocols import Owner, fields_owned
from atoll.core.pytree import trees
from atoll.engines.elastic.checksum import checksum, combined


def digest_of(shared: Mapping[str, Any], plain: Mapping[str, Any]) -> int:
    """Of all that islands hold alike."""
    sums = [checksum(tree.flat) for tree in trees(shared)]
    return combined(sums, json.dumps([plain[name] for name in ("leases", "judge", "known", "here")]))


def check_elastic(algorithm: Any, state: Any) -> None:
    """Refuse what an island that vanishes would take along."""
    if fields_owned(state, Owner.SHARDED):
        raise ConfigError(
            f"{type(algorithm).__name__} with --elastic: each island holds a slice of its state, which is lost with it. Use "
            f"DiLoCo or DDP, or --engine dist alone, which goes on from checkpoints."
        )
    if getattr(algorithm, "missed", "global") != "global":
        raise ConfigError(
            "algorithm.missed=agreed with --elastic: who misses a meeting goes on from the others' weights. Use global."
        )
