"""Models that atoll builds: one readable decoder, with the papers' sizes as presets, and a perceptron for the toy."""

from atoll.models.gpt import GPT, Decoder
from atoll.models.mlp import MLP

__all__ = ["GPT", "MLP", "Decoder"]
