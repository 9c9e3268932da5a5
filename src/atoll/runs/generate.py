"""Text from a trained run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from atoll.core.errors import ConfigError
from atoll.data.instructions import Instructions, load_model_tokenizer
from atoll.data.tokenizer import load_saved_tokenizer
from atoll.models.gpt import Decoder
from atoll.models.mlp import MLP
from atoll.models.pretrained import silent_transformers
from atoll.runs.export import generation_limits, trained
from atoll.runs.folder import RunFolder


def generate(folder: Path, prompt: str, *, tokens: int, temperature: float, top_k: int | None, seed: int) -> str:
    """The prompt and the text that the model generates after it."""
    opened = RunFolder.open(folder)
    opened.refuse_own_workload()
    run = opened.run
    if isinstance(run.model, MLP):
        raise ConfigError(
            f"{folder} trained an {type(run.model).__name__} on {type(run.data).__name__}: there is no text to write. "
            f"Give the folder of a run that trained a decoder on text."
        )
    if not prompt:
        raise ConfigError("the prompt is empty: a model needs something to go on from. Give --prompt at least one character.")
    run, module = trained(folder)
    if isinstance(run.data, Instructions):
        assert run.data.tokenizer is not None, "a resolved run names its tokenizer"
        encoder = load_model_tokenizer(run.data.tokenizer)
        ends = {"pad_token_id": encoder.eos_token_id}
        return str(
            encoder.decode(
                _generate(module, encoder(prompt)["input_ids"], tokens, temperature, top_k, seed, ends), skip_special_tokens=True
            )
        )
    tokenizer = load_saved_tokenizer(opened.tokenizer)
    start = torch.as_tensor(tokenizer.encode(prompt), dtype=torch.int64)
    if isinstance(module, Decoder):
        generator = torch.Generator().manual_seed(seed)
        return tokenizer.decode(module.generate(start, tokens, temperature, top_k, generator).tolist())
    ends = generation_limits(module, tokenizer)
    return tokenizer.decode(_generate(module, start.tolist(), tokens, temperature, top_k, seed, ends))


def _generate(
    module: Any, prompt: list[int], tokens: int, temperature: float, top_k: int | None, seed: int, limits: Mapping[str, Any]
) -> list[int]:
    """The prompt and what the model's own library generates after it, up to an end of text or the model's last position."""
    length, places = len(prompt), getattr(module.config, "max_position_embeddings", None)
    if places is not None and length >= places:
        raise ConfigError(f"the prompt has {length} tokens, and the model reads at most {places} with what it adds. Shorten it.")
    ids = torch.tensor([prompt])
    chance = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0} if temperature else {"do_sample": False}
    with torch.random.fork_rng(devices=[]), silent_transformers():
        torch.default_generator.manual_seed(seed)
        written = module.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens if places is None else min(tokens, places - length),
            **limits,
            **chance,
        )
    found: list[int] = written[0].tolist()
    return found
