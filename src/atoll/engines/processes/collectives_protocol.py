"""What peers need of a wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Collectives(Protocol):
    """The collectives of one group; `Wire` says what each of them does."""

    limit_s: float

    @property
    def sent_bytes(self) -> int: ...

    @property
    def control_bytes(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def tell(self, *numbers: float) -> list[list[float]]: ...

    def scatter_sum(
        self,
        flat: Tensor,
        weights: Sequence[float],
        sums: torch.dtype | None = None,
        *,
        products: Tensor | None = None,
        over: float | None = None,
    ) -> Tensor: ...

    def gather(self, whole: Tensor) -> None: ...
