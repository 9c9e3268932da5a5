"""A pretrained model for tests and for a first try, made on the spot: a folder that the transformers library loads.

It knows nothing yet, which is what makes it small: some twelve thousand parameters, and a tokenizer of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from atoll.core.optional_imports import require

SUMS = tuple({"prompt": f"{a}+{b}=", "completion": f"{a + b}" + "!" * (a % 4)} for a in range(8) for b in range(8))
"""Examples of different lengths: additions of one digit, with some noise about them."""


def save_tiny_model(folder: str | Path, *, tied: bool = True, dropout: float = 0.0, positions: int = 64, seed: int = 0) -> Path:
    """Writes a GPT-Neo with two layers, and its tokenizer, into a folder. The global random numbers stay as they are.

    Args:
        folder: where to.
        tied: whether the output projection is the embedding itself.
        dropout: of the residual stream.
        positions: the longest text it reads, in tokens.
        seed: of its weights.
    """
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
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = transformers.GPTNeoForCausalLM(config)
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    module.save_pretrained(folder)
    if bars:
        transformers.utils.logging.enable_progress_bar()
    save_byte_tokenizer(folder)
    return folder


def save_byte_tokenizer(folder: str | Path) -> None:
    """Writes a tokenizer with an id for each byte and one for the end of a text, `<|endoftext|>`."""
    tokenizers = require("tokenizers", extra="hf", purpose="BPE tokenizers")
    transformers = require("transformers", extra="hf", purpose="pretrained models")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)


def write_jsonl(path: str | Path, records: Sequence[Mapping[str, object]]) -> Path:
    """Writes one JSON object on each line."""
    path = Path(path)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
