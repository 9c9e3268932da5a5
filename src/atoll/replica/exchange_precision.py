"""In which precision slices of a model travel."""

from __future__ import annotations

from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.layout import Layout
from atoll.core.protocols import HoldsWeights


def check_travels(algorithm: Any, layout: Layout) -> None:
    """Refuses slices of several precisions, where each travels in its own: islands would send each other what nobody expects."""
    dtypes = {piece.dtype for piece in layout.pieces}
    if isinstance(algorithm, HoldsWeights) and len(dtypes) > 1 and getattr(algorithm, "wire", "") == "own":
        raise ConfigError(
            f"the model has parameters in {sorted(map(str, dtypes))}, and slices of it travel in the precision of the model, which "
            f'differs from slice to slice. Give the algorithm wire="fp32".'
        )
