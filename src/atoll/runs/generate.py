"""Text from a trained run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from atoll.core.errors import ConfigError
from atoll.data.instructions import Instructions, load_model_tokenizer
from atoll.data.tokenizer import ByteTokenizer, load_tokenizer
from atoll.models.gpt import Decoder
from atoll.models.mlp import MLP
from atoll.models.pretrained import silent_transformers
from atoll.runs.export import trained
from atoll.runs.folder import RunFolder


def generate(folder: Path, prompt: str, *, tokens: int, temperature: float, top_k: int | None, seed: int) -> Iterator[str]:
    """The prompt, and then what the run's final weights make of it."""
    opened = RunFolder.open(folder)
    opened.check_workload(None)
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
        yield _pretrained(run.data, module, prompt, tokens, temperature, top_k, seed)
        return
    assert isinstance(module, Decoder)
    kept = opened.tokenizer
    tokenizer = load_tokenizer(str(kept)) if kept.exists() else ByteTokenizer()
    start = torch.as_tensor(tokenizer.encode(prompt), dtype=torch.int64)
    written = module.generate(start, tokens, temperature, top_k, torch.Generator().manual_seed(seed))
    yield tokenizer.decode(written.tolist())


def _pretrained(data: Instructions, module: Any, prompt: str, tokens: int, temperature: float, top_k: int | None, seed: int) -> str:
    """A pretrained model writes with its library's own means, up to the end of the text or of what it can read."""
    assert data.tokenizer is not None, "a resolved run names its tokenizer"
    tokenizer = load_model_tokenizer(data.tokenizer)
    start = tokenizer(prompt, return_tensors="pt")
    length, places = start["input_ids"].shape[1], getattr(module.config, "max_position_embeddings", None)
    if places is not None and length >= places:
        raise ConfigError(f"the prompt has {length} tokens, and the model reads at most {places} with what it adds. Shorten it.")
    chance = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0} if temperature else {"do_sample": False}
    with torch.random.fork_rng(devices=[]), silent_transformers():
        torch.default_generator.manual_seed(seed)
        written = module.generate(
            input_ids=start["input_ids"],
            attention_mask=start["attention_mask"],
            max_new_tokens=tokens if places is None else min(tokens, places - length),
            pad_token_id=tokenizer.eos_token_id,
            **chance,
        )
    return str(tokenizer.decode(written[0], skip_special_tokens=True))
