"""What one process did in a round, by its own clock: written down as it happens, and told to the first rank as one line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class ComputeRecord:
    """It computed."""

    start_s: float
    end_s: float
    steps: int
    batches: float
    tokens: int
    loss: float
    moved: bool


@dataclass(frozen=True)
class ExchangeRecord:
    """It met others."""

    what: str
    arrived_s: float
    end_s: float
    sent_bytes: int
    control_bytes: int
    weight: float
    background: bool
    unsound: tuple[int, ...] = ()
    """Ranks whose tree was not finite."""
    useless: bool = False
    """Whether no update can be made of it: somebody's tree was not finite, or nobody had any."""


@dataclass(frozen=True)
class DeltaSimilarity:
    """Inner products of what islands brought to a mean, over this rank's slice: row by row, in rank order."""

    products: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]


@dataclass
class RoundRecord:
    """One round of one process.

    Attributes:
        stretches: what it computed.
        meetings: with other islands.
        inside: with the other devices of its island.
        tokens: in updates that were made in this round.
        dropped: tokens whose gradients went into no update, since the island was given other weights.
        updates: rounds of the algorithm inside an island, where there is one.
        skipped: of these, left out; each by devices whose gradients were not finite.
        likenesses: of what islands brought to means, where these are compared.
    """

    stretches: list[ComputeRecord] = field(default_factory=list)
    meetings: list[ExchangeRecord] = field(default_factory=list)
    inside: list[ExchangeRecord] = field(default_factory=list)
    tokens: int = 0
    dropped: int = 0
    updates: int = 0
    skipped: list[tuple[int, ...]] = field(default_factory=list)
    likenesses: list[DeltaSimilarity] = field(default_factory=list)

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_line(line: str) -> RoundRecord:
        record: dict[str, Any] = json.loads(line)
        record["stretches"] = [ComputeRecord(**stretch) for stretch in record["stretches"]]
        for name in ("meetings", "inside"):
            record[name] = [ExchangeRecord(**{**m, "unsound": tuple(m["unsound"])}) for m in record[name]]
        record["likenesses"] = [
            DeltaSimilarity(tuple(map(tuple, x["products"])), tuple(x["weights"])) for x in record["likenesses"]
        ]
        record["skipped"] = [tuple(devices) for devices in record["skipped"]]
        return RoundRecord(**record)
