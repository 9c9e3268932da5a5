"""Hugging Face: a callback that makes a Trainer one of several islands.

    rank, size = atoll.integrations.hf.alone()  # first: each process is an island, and trains by itself
    arguments = TrainingArguments(output_dir=f"out/island{rank}", ...)
    callback = IslandsCallback(atoll.DiLoCo(inner_steps=500))
    trainer = Trainer(model, arguments, train_dataset=dataset.shard(size, rank), callbacks=[callback])
    with callback:
        trainer.train()

    trainer.save_model()

Start it by torchrun. The `with` tells the others at once if training raises; without it they find out when the process ends. After
training the model is what all agreed on. Checkpoints on the way are for going on, and hold this island's own weights.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from atoll.core.atomic_files import replacing
from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.optional_imports import require
from atoll.core.protocols import Algorithm
from atoll.integrations.alone import alone as alone
from atoll.integrations.block import Block
from atoll.loop.islands import Islands

_Callback: Any = require("transformers.trainer_callback", extra="hf", purpose="Hugging Face's callbacks").TrainerCallback

FILE = "islands.pt"
"""In each checkpoint's folder."""


class IslandsCallback(_Callback):  # type: ignore[misc]
    """Islands agree every so many steps of the Trainer's optimizer. Gradient accumulation and mixed precision are fine.

    Its state is saved with each checkpoint, and loaded when training is resumed from one: from the folder that `resume` names, else
    from the one of that step in the Trainer's own.

    Args:
        algorithm: what the islands do, such as DiLoCo: one that counts the steps of an optimizer.
        limit_s: as in `atoll.islands`.
        finish: see there.
        examples: see there.
        resume: the checkpoint's folder, where training is resumed from one that lies elsewhere.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        *,
        limit_s: float | None = None,
        finish: Literal["together", "alone"] = "together",
        examples: int | None = None,
        resume: str | Path | None = None,
    ) -> None:
        self._block = Block("Trainer", algorithm, limit_s=limit_s, finish=finish, examples=examples)
        self._resume = resume

    @property
    def islands(self) -> Islands | None:
        """What `atoll.islands` gives, once training has begun."""
        return self._block.islands

    def __enter__(self) -> IslandsCallback:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._block.close(error)

    # What Trainer calls hands over more than is named here, and more with each version.

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
        if args.load_best_model_at_end:
            raise ConfigError(
                "load_best_model_at_end=True would put old weights of one island into the last agreement. Turn it off, and load "
                "the best checkpoint after training."
            )
        if state.global_step > 0:
            given = self._resume or args.resume_from_checkpoint
            folder = Path(given) if isinstance(given, str | Path) else Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self._block.load(_read(folder))
        self._block.open(model, optimizer, max(args.world_size, args.n_gpu))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        with replacing(folder / FILE, CheckpointError) as file:
            torch.save(self._block.state(), file)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._block.close()


def _read(folder: Path) -> Any:
    if not (folder / FILE).exists():
        raise CheckpointError(
            f"{folder} has no {FILE}: it was saved without islands, or lies elsewhere. Say where with IslandsCallback(resume=...), "
            f"or train from the model's weights alone."
        )
    return torch.load(folder / FILE, map_location="cpu", weights_only=True)
