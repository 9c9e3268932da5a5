"""Models: one readable decoder, with the papers' sizes as presets, a perceptron for the toy, and models of others from disk."""

from atoll.models.gpt import GPT, Decoder
from atoll.models.mlp import MLP
from atoll.models.pretrained import Pretrained

__all__ = ["GPT", "MLP", "Decoder", "Pretrained"]
