"""Text from a trained run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from atoll.data.text import Text
from atoll.data.tokenizer import ByteTokenizer, load_tokenizer
from atoll.errors import ConfigError
from atoll.models.gpt import GPT
from atoll.runs.execute import TOKENIZER, check_workload
from atoll.runs.folder import RunFolder
from atoll.runs.run import Run
from atoll.runs.settings import from_json
from atoll.tensorfile import load_tree


def generate(folder: Path, prompt: str, *, tokens: int, temperature: float, top_k: int | None, seed: int) -> Iterator[str]:
    """The prompt, and then what the run's final weights make of it."""
    opened = RunFolder.open(folder)
    check_workload(opened, None)
    run: Run = from_json(opened.run_json)
    if not isinstance(run.model, GPT) or not isinstance(run.data, Text):
        raise ConfigError(
            f"{folder} trained an {type(run.model).__name__} on {type(run.data).__name__}: there is no text to write. "
            f"Give the folder of a run that trained a decoder on text."
        )
    if not opened.final.exists():
        raise ConfigError(f"{folder} has no final weights yet: its run is not finished. Finish it: atoll run --resume {folder}")
    if not prompt:
        raise ConfigError("the prompt is empty: a model needs something to go on from. Give --prompt at least one character.")
    kept = opened.path / TOKENIZER
    tokenizer = load_tokenizer(str(kept)) if kept.exists() else ByteTokenizer()
    module = run.model.build(tokenizer.vocab_size, run.data.seq_len, run.seed)
    params = load_tree(opened.final)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(params[name])
    module.eval()
    start = torch.as_tensor(tokenizer.encode(prompt), dtype=torch.int64)
    written = module.generate(start, tokens, temperature, top_k, torch.Generator().manual_seed(seed))
    yield tokenizer.decode(written.tolist())
