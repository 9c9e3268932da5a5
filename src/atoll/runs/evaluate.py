"""Evaluates the model of a finished run on any text: its perplexity, or how well it predicts the last word of each passage.

The last word is what LAMBADA asks for (Paperno et al., arXiv 1606.06031): the model reads a passage up to its last word. A word may
have several tokens: its probability is their product, and it is predicted if each of them is the likeliest one at its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.core.errors import ConfigError, DataError
from atoll.core.events import Progress
from atoll.data.document_sources import Document, open_corpus
from atoll.data.instructions import Instructions, load_model_tokenizer
from atoll.data.tokenizer import load_saved_tokenizer
from atoll.models.gpt import Decoder
from atoll.models.mlp import MLP
from atoll.runs.export import trained
from atoll.runs.folder import RunFolder
from atoll.runs.run_settings import Run
from atoll.runs.workloads import causal_logits

_BATCH_TOKENS = 16_384
_LONGEST = 1_024
"""Tokens that a pretrained model reads at once, if it could read more."""

TokenIds = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The scores of one model on one text. With `last_word`, loss and perplexity are those of a word, else of a token."""

    on: str
    last_word: bool
    documents: int  # that were scored
    tokens: int  # that were predicted
    loss: float  # the mean negative log-likelihood, in nats
    perplexity: float
    bits_per_byte: float | None = None  # of the whole text; without the last word only
    accuracy: float | None = None  # the share of last words that were predicted
    skipped: int | None = None  # documents without a word before their last; with the last word only
    warning: str | None = None  # if the text does not seem to be what was asked for

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def evaluate(
    folder: str | Path,
    on: str,
    *,
    last_word: bool = False,
    limit_bytes: int | None = None,
    device: str | None = None,
    progress: Callable[[Progress], object] = lambda event: None,
) -> Evaluation:
    """Evaluate the final weights of a run.

    Args:
        folder: the run's folder.
        on: the text: `stdlib`, `files:PATH[#field]` or `hf:NAME[@configuration][:split][#field]`.
        last_word: score the last word of each document instead of all tokens. A text file is one document, unless lines
            `<|endoftext|>` end its passages; a `.jsonl` file has one in each line.
        limit_bytes: bytes of text to read at most.
        device: to compute on; none: a GPU if there is one.
        progress: takes how far the evaluation is.

    Raises:
        ConfigError: the run is not finished, or did not train a language model.
        DataError: the text cannot be read, or no document has a last word after others.
    """
    opened = RunFolder.open(folder)
    opened.refuse_own_workload()
    if isinstance(opened.run.model, MLP):
        raise ConfigError(f"{folder} trained an MLP, which reads no text. Give the folder of a run that trained a language model.")
    documents = list(open_corpus(on, limit_bytes))
    run, module = trained(folder)
    encode, end_of_text = _encoder(opened, run)
    model = Scorer(module, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not last_word:
        tails = np.array([] if end_of_text is None else [end_of_text], np.int64)
        ids = np.concatenate([part for document in documents for part in (encode(document.text), tails)])
        windows = [(ids[start : start + model.seq_len + 1], 1) for start in range(0, len(ids) - 1, model.seq_len)]
        scores = list(model.score(windows, progress))
        tokens, total = sum(count for _, count, _ in scores), math.fsum(loss for loss, _, _ in scores)
        if not tokens:
            raise DataError(f"{on} has {len(ids)} tokens, and the first is not predicted: at least 2 are needed. Give more text.")
        text_bytes = sum(len(document.text.encode(errors="replace")) for document in documents)
        bits = total / math.log(2) / text_bytes
        found: dict[str, Any] = {"tokens": tokens, "loss": total / tokens, "bits_per_byte": bits}
    else:
        found_passages = [_last_word(document, encode, model.seq_len) for document in documents]
        passages = [passage for passage in found_passages if passage is not None]
        if not passages:
            raise DataError(
                f"no document of {on} has a word before its last one, such as {documents[0].name}: a passage is a context and a "
                f"word. Give such passages, one to a document."
            )
        scores = list(model.score(passages, progress))
        loss = math.fsum(loss for loss, _, _ in scores) / len(scores)
        correct = sum(likeliest for _, _, likeliest in scores)
        found = {"tokens": sum(count for _, count, _ in scores), "loss": loss, "accuracy": correct / len(scores)}
        found["skipped"] = len(documents) - len(passages)
        found["warning"] = _single_document(on, documents)
    scored = len(documents) - found.get("skipped", 0)
    return Evaluation(on=on, last_word=last_word, documents=scored, perplexity=math.exp(found["loss"]), **found)


def _single_document(on: str, documents: Sequence[Document]) -> str | None:
    """What to say where a file of several lines is one passage, of which one word is scored."""
    lines = len([line for line in documents[0].text.splitlines() if line.strip()])
    if len(documents) > 1 or lines < 2:
        return None
    return (
        f"{on} is one document of {lines} lines, so one word was scored. If each line is a passage, put them into a .jsonl file, "
        f'one {{"text": ...}} to a line, or end each with a line <|endoftext|>.'
    )


def _encoder(folder: RunFolder, run: Run) -> tuple[Callable[[str], TokenIds], int | None]:
    """Text to ids with the run's tokenizer, and the id that ends a document."""
    if not isinstance(run.data, Instructions):
        tokenizer = load_saved_tokenizer(folder.tokenizer)
        return lambda text: tokenizer.encode(text).astype(np.int64), tokenizer.end_of_text
    assert run.data.tokenizer is not None, "a resolved run names its tokenizer"
    pretrained = load_model_tokenizer(run.data.tokenizer)
    return lambda text: np.array(pretrained(text, add_special_tokens=False)["input_ids"], np.int64), pretrained.eos_token_id


def _last_word(document: Document, encode: Callable[[str], TokenIds], seq_len: int) -> tuple[TokenIds, int] | None:
    """The tokens of a passage, as many as the model reads, and the position of the first of its last word; None if no word stands
    before it."""
    text = document.text.strip()
    context = text.rpartition(text.split()[-1])[0].rstrip() if text else ""
    if not context:
        return None
    before, word = encode(context), encode(text[len(context) :])  # the blank belongs to the word, as tokenizers have it
    ids = np.concatenate([before, word])[-(seq_len + 1) :]
    return ids, max(1, len(ids) - len(word))


class Scorer:
    """Scores the tokens of rows from a position on, with a language model in evaluation mode."""

    def __init__(self, module: nn.Module, device: str) -> None:
        self._module, self._device = module.to(device), device
        positions = getattr(getattr(module, "config", None), "max_position_embeddings", None) or _LONGEST
        self.seq_len: int = module.seq_len if isinstance(module, Decoder) else min(positions, _LONGEST)

    def score(
        self, rows: Sequence[tuple[TokenIds, int]], progress: Callable[[Progress], object]
    ) -> Iterator[tuple[float, int, bool]]:
        """For each row its summed loss from its position on, the number of these tokens, and whether each was the likeliest."""
        size = max(1, _BATCH_TOKENS // self.seq_len)
        for start in range(0, len(rows), size):
            yield from self._score_batch(rows[start : start + size])
            progress(Progress(phase="evaluate", done=min(start + size, len(rows)), total=len(rows)))

    @torch.no_grad()
    def _score_batch(self, rows: Sequence[tuple[TokenIds, int]]) -> Iterator[tuple[float, int, bool]]:
        longest = max(len(ids) for ids, _ in rows)
        # Padding stands at the end, where a causal model's earlier positions do not see it.
        padded = torch.zeros(len(rows), longest, dtype=torch.int64)
        for row, (ids, _) in zip(padded, rows, strict=True):
            row[: len(ids)] = torch.from_numpy(ids)
        tokens = padded.to(self._device)
        logits = self._logits(tokens[:, :-1]).float()
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(rows), -1).double()
        likeliest = logits.argmax(-1) == tokens[:, 1:]
        for number, (ids, first) in enumerate(rows):
            place = slice(first - 1, len(ids) - 1)
            yield float(losses[number, place].sum()), len(ids) - first, bool(likeliest[number, place].all())

    def _logits(self, tokens: Tensor) -> Tensor:
        if isinstance(self._module, Decoder):
            logits: Tensor = self._module(tokens)
            return logits
        return causal_logits(self._module, tokens)
