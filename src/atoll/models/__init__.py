"""Models that atoll builds: one readable decoder, with the papers' sizes as presets."""

from atoll.models.gpt import GPT, Decoder

__all__ = ["GPT", "Decoder"]
