"""Records that travel between the driving process, the hub and the workers, and weights as arrays of bytes.

Weights and deltas travel as the bytes of a Tree, or encoded (see `engines.hub_encoding`). Ray's object store shares such an array
with every process of a machine without a copy, so a process only reads what comes from the store.

>>> weights = Tree.of({"w": torch.ones(2)})
>>> tree_view(tree_bytes(weights), weights.layout, "float32")["w"]
tensor([1., 1.])
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.core.events import Evaluated, Event
from atoll.core.flat_tree import Tree, empty
from atoll.core.layout import Layout
from atoll.core.protocols import Work
from atoll.engines.accounting import ComputeSpan
from atoll.engines.ray.spec import Ray
from atoll.runs.run_settings import Run

ByteArray = NDArray[np.uint8]

RoundId = tuple[int, int]
"""Identifies a round: its number, and the epoch of the hub that dispatched it. A hub that resumes from a checkpoint uses
the numbers of lost rounds again."""

Rejection = Literal["register", "replaced", "finished"]
"""Why the hub does not serve a call. register: it does not know the worker. replaced: a newer worker has its slot. finished: the
run has its local updates."""

PushStatus = Literal["accepted", "duplicate", "refused", "unknown"] | Rejection
"""The hub's reply to a push. duplicate: it had accepted this update before. refused: the update is unusable. unknown: a restarted
hub has lost the round."""


class TaskMessage(NamedTuple):
    """The hub's reply to a pull."""

    status: Literal["train", "wait"] | Rejection
    round_id: RoundId = (-1, -1)
    steps: int = 0
    work: Work | None = None
    weights: tuple[Any, ...] = ()  # a reference into the object store, in a tuple of one
    dtype: str = ""
    fresh_optimizer: bool = False  # the worker must reset its inner optimizer: the hub does not know the rounds it was trained on
    now_s: float = 0.0
    encoded: bool = False  # the weights are, by how they differ from those of this worker's last round


class UpdateMessage(NamedTuple):
    """A worker's push, besides the delta. Times are on the hub's clock, as last seen by the worker."""

    worker: int
    incarnation: int
    round_id: RoundId
    begin_s: float  # the worker had its weights
    pushed_s: float  # it began to send
    computed: tuple[ComputeSpan, ...]
    buffers: dict[str, NDArray[Any]]
    encoded: bool = False  # the delta is in the plan's codec

    @property
    def computed_s(self) -> float:
        return sum(record.end_s - record.start_s for record in self.computed)


class EvaluationRequest(NamedTuple):
    """Weights to evaluate: `due` is the event without its metrics, `weights` a reference in a tuple of one."""

    number: int
    due: Evaluated
    weights: tuple[Any, ...]
    buffers: Mapping[str, Any]


class HubStatus(NamedTuple):
    """The hub's reply to a poll of the driving process: events and requests that it has not seen, and the state of the run."""

    epoch: int  # identifies the hub process
    events: list[Event]
    events_seen: int  # number of events of this hub, including these
    evaluations: list[EvaluationRequest]
    local_updates: int
    workers: dict[int, tuple[int, bool]]  # incarnation of each registered worker, and whether an update of it was accepted
    overdue: dict[int, float]  # seconds since the dispatch of each worker that is much slower than before
    done: bool  # the run has its local updates
    evaluated: bool  # no evaluation is outstanding
    error: Exception | None  # ends the run


class LostRounds(NamedTuple):
    """Accepted rounds, and their local updates, that the log has after the last checkpoint."""

    rounds: int
    local_updates: int


@dataclass(frozen=True, kw_only=True)
class HubProcessSpec:
    """What a hub process is made of."""

    run: Run  # resolved
    engine: Ray
    examples: tuple[int, ...]  # of each shard
    layout: Layout
    dtype: str
    begin_bytes: int  # length of the event log at the start of the run
    lost: LostRounds  # rounds that the event log had after the last checkpoint when this session began
    session: str  # identifies the driving process; a new session resumes from the saved time, with new workers
    folder: Path  # of the run
    origin: Mapping[str, str | None]  # digests of the Run and of the data, for a checkpoint's metadata
    warm_start_tokens: int


def tree_bytes(tree: Tree) -> ByteArray:
    """The bytes of a Tree's buffer: a view of it in CPU memory, else a copy."""
    array: ByteArray = tree.flat.detach().cpu().view(torch.uint8).numpy()
    return array


def dtype_name(tree: Tree) -> str:
    return str(tree.flat.dtype).removeprefix("torch.")


def tree_view(array: ByteArray, layout: Layout, dtype: str) -> Tree:
    """A Tree over these bytes, only to be read. Their number must be the layout's."""
    return Tree(layout, torch.from_numpy(array).view(getattr(torch, dtype)))


def tree_copy(array: ByteArray, layout: Layout, dtype: str, device: str) -> Tree:
    """A Tree with a copy of these bytes."""
    flat = empty(layout.numel, getattr(torch, dtype), torch.device("cpu"))
    np.copyto(flat.view(torch.uint8).numpy(), array)
    return Tree(layout, flat).to(device)


def arrays_of(buffers: dict[str, Tensor]) -> dict[str, NDArray[Any]]:
    return {name: buffer.detach().cpu().numpy().copy() for name, buffer in buffers.items()}


def tensors_of(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    return {name: torch.tensor(array) for name, array in arrays.items()}


def ignore_read_only_warning() -> None:
    """torch cannot mark a tensor as read-only, and warns about arrays from the object store. No process writes to those."""
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
