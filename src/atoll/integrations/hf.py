"""Hugging Face: a callback that makes a Trainer an island. Start the script by torchrun.

    rank, size = atoll.integrations.hf.alone()  # first in the script: each process is an island with its own Trainer
    arguments = TrainingArguments(output_dir=f"out/island{rank}", ...)
    callback = IslandsCallback(atoll.DiLoCo(inner_steps=500))
    trainer = Trainer(model, arguments, train_dataset=dataset.shard(size, rank), callbacks=[callback])
    with callback:
        trainer.train()

    trainer.save_model()

If training raises, `with callback` makes the island leave at once; without it the others notice when the process ends. After
training the model holds the agreed weights. Evaluations during training are of the last agreed weights, and a checkpoint right
after one holds what was evaluated. Other checkpoints hold this island's own weights. Training resumes from both. The
checkpoint after the last step holds the agreed weights. Island 0 prints and reports to TensorBoard and the like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.optional_imports import require
from atoll.core.protocols import Algorithm, Sink
from atoll.core.verified_files import replacing
from atoll.integrations.trainer_context import TrainerIslands, alone as alone
from atoll.loop.topology import hidden_position

_Callback: Any = require("transformers.trainer_callback", extra="hf", purpose="Hugging Face's callbacks").TrainerCallback

FILE = "islands.pt"
"""In each checkpoint's folder, of the island or of its first device."""


class HuggingFaceIslands(TrainerIslands, _Callback):  # type: ignore[misc]
    """Counts the steps of the Trainer's optimizer. Gradient accumulation and mixed precision are supported.

    After `alone(devices=N)` Trainer trains each island data-parallel on N processes. Every checkpoint contains the callback's
    state. A resumed training loads it from the folder `resume`, or from the Trainer's own folder.

    Args:
        algorithm: one that counts the steps of an optimizer, such as DiLoCo. `atoll.islands` documents the other arguments.
        resume: folder of the checkpoint, if it is not in the Trainer's output folder.
    """

    trainer = "Trainer"

    def __init__(
        self,
        algorithm: Algorithm[Any],
        *,
        limit_s: float | None = None,
        finish: Literal["together", "alone"] = "together",
        examples: int | None = None,
        trusted_network: bool = False,
        average_buffers: bool = False,
        out: str | Path | None = None,
        sinks: Sequence[Sink] = (),
        resume: str | Path | None = None,
    ) -> None:
        given: dict[str, Any] = {"limit_s": limit_s, "finish": finish, "examples": examples, "trusted_network": trusted_network}
        super().__init__(algorithm, **given, average_buffers=average_buffers, out=out, sinks=sinks)
        self._resume = resume

    def __enter__(self) -> HuggingFaceIslands:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close(error)

    # Trainer passes more keyword arguments than these, and more with each version.

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        _silence_others(state)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
        _silence_others(state)
        if args.load_best_model_at_end:
            raise ConfigError(
                "load_best_model_at_end=True would put old weights of one island into the last exchange. Set it to False, and load "
                "the best checkpoint after training."
            )
        if state.global_step > 0:
            given = self._resume or args.resume_from_checkpoint
            folder = Path(given) if isinstance(given, str | Path) else Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self._loaded = _read(folder)
        self._open(model, optimizer, max(args.world_size, args.n_gpu))
        if args.eval_on_start:
            self._begin_evaluation()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._end_evaluation()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Trainer's own flow of training has decided before this callback; after it, Trainer evaluates all datasets, and then saves.
        if control.should_training_stop:
            self._finish()
        if control.should_evaluate:
            self._begin_evaluation()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_step_end(args, state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, float] | None = None, **_: Any) -> None:
        self._evaluated({name.removeprefix("eval_"): value for name, value in (metrics or {}).items()})

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:
        self._log((logs or {}).get("loss"))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        with replacing(folder / _file(), CheckpointError) as file:
            torch.save(self._state(), file)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._close()


def _silence_others(state: Any) -> None:
    """Trainer's callbacks print and report in process 0 of all."""
    if hidden_position().island:
        state.is_local_process_zero = state.is_world_process_zero = False


def _file() -> str:
    """Each device of an island saves its slice."""
    device = hidden_position().device
    return f"islands-{device}.pt" if device else FILE


def _read(folder: Path) -> Any:
    if not (folder / _file()).exists():
        raise CheckpointError(
            f"{folder} has no {_file()}: it was saved without islands, or the checkpoint is in another folder. Give that folder by "
            f"IslandsCallback(resume=...), or start from the model's weights alone."
        )
    return torch.load(folder / _file(), map_location="cpu", weights_only=True)


IslandsCallback = HuggingFaceIslands
"""The name by which users know it, as in `atoll.integrations.lightning`."""
