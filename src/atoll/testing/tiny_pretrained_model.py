"""A tiny model with random weights and a byte tokenizer, saved as a folder that the transformers library loads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from atoll.core.optional_imports import require
from atoll.data.tokenizer import ByteTokenizer, huggingface_files
from atoll.models.pretrained import silent_transformers

SUMS = tuple({"prompt": f"{a}+{b}=", "completion": f"{a + b}" + "!" * (a % 4)} for a in range(8) for b in range(8))
"""64 records of different lengths: sums of two digits, with 0 to 3 exclamation marks."""


def save_tiny_model(folder: str | Path, *, dropout: float = 0.0, positions: int = 64, seed: int = 0) -> Path:
    """Write a GPT-Neo with two layers, 12,000 parameters, and its tokenizer. The global RNG keeps its state."""
    transformers = require("transformers", extra="hf", purpose="pretrained models")
    folder = Path(folder)
    config = transformers.GPTNeoConfig(
        vocab_size=257,
        max_position_embeddings=positions,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        resid_dropout=dropout,
        bos_token_id=256,
        eos_token_id=256,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = transformers.GPTNeoForCausalLM(config)
    with silent_transformers():
        module.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


def save_byte_tokenizer(folder: str | Path) -> None:
    """Write the byte tokenizer: an id for each byte and one for the end of a text, `<|endoftext|>`."""
    for name, content in huggingface_files(ByteTokenizer(), 1 << 20).items():
        (Path(folder) / name).write_text(json.dumps(content))


def write_jsonl(path: str | Path, records: Sequence[Mapping[str, object]]) -> Path:
    path = Path(path)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
