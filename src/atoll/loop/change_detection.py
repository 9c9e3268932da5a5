"""Whether somebody has worked on a module: what backward passes and steps leave on its parameters.

Nothing is hooked into the module, which may be compiled or sharded: versions that torch counts anyway are read before and after.

>>> model = nn.Linear(2, 1)
>>> before = footprints(model)
>>> model(torch.ones(1, 2)).sum().backward()
>>> footprints(model) == before
False
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

Footprints: TypeAlias = list[tuple[int, tuple[int, int] | None]]


def footprints(model: nn.Module) -> Footprints:
    """They stay the same for as long as nobody changes a weight or a gradient."""
    return [(parameter._version, _of(parameter.grad)) for parameter in model.parameters() if parameter.requires_grad]


def _of(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (id(gradient), gradient._version)
