"""A perceptron with one hidden layer: the model of the asynchronous Local-SGD authors' toy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn

from atoll.core.config.type_checks import AtMost, check_positive, check_types
from atoll.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MLP:
    """A perceptron with one hidden layer.

    Args:
        hidden: number of hidden units; the authors' large run has 65,000.
    """

    hidden: Annotated[int, AtMost(2**30)] = 65_000

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "hidden")

    def build(self, inputs: int, outputs: int, seed: int) -> nn.Sequential:
        """A module in float32 with torch's default initial weights, drawn with `seed`. The global RNG keeps its state.

        `inputs` is the number of elements of an example, `outputs` the number of classes.
        """
        if inputs < 1 or outputs < 1:
            raise ConfigError(f"inputs={inputs}, outputs={outputs}: a perceptron has at least 1 of each.")
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed: it would also seed CUDA, whose state is not restored here.
            torch.default_generator.manual_seed(seed)
            return nn.Sequential(nn.Flatten(), nn.Linear(inputs, self.hidden), nn.ReLU(), nn.Linear(self.hidden, outputs))

    def num_params(self, inputs: int, outputs: int) -> int:
        """Number of trainable parameters, without building a module."""
        return (inputs + 1) * self.hidden + (self.hidden + 1) * outputs

    @staticmethod
    def small() -> MLP:
        """The authors' small run: 66,180 parameters for 512 inputs and 4 classes."""
        return MLP(hidden=128)
