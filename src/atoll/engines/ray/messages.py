"""Records that travel between the driving process, the hub and the workers, and weights as arrays of bytes.

Weights and deltas travel as the bytes of a Tree. Ray's object store shares such an array with every process of a machine without a
copy, so a process only reads what comes from the store.

>>> weights = Tree.of({"w": torch.ones(2)})
>>> tree_view(tree_bytes(weights), weights.layout, "float32")["w"]
tensor([1., 1.])
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.core.events import Evaluated, Event
from atoll.core.flat_tree import Tree, empty
from atoll.core.layout import Layout
from atoll.core.protocols import AsyncAlgorithm, Plan, Work
from atoll.engines.accounting import ComputeSpan
from atoll.engines.ray.hub_storage import HubStorage, LostRounds

ByteArray = NDArray[np.uint8]

RoundId = tuple[int, int]
"""Identifies a round: its number, and the epoch of the hub that dispatched it. A hub that resumes from a checkpoint uses
the numbers of lost rounds again."""

PullStatus = Literal["train", "wait", "register", "replaced", "finished"]
"""The hub's reply to a pull. register: the hub does not know the worker. replaced: a newer worker has its slot. finished: the run
has its local updates."""

PushStatus = Literal["accepted", "duplicate", "refused", "unknown", "register", "replaced", "finished"]
"""The hub's reply to a push. duplicate: it had accepted this update before. refused: the update is unusable. unknown: a restarted
hub has lost the round."""


class TaskMessage(NamedTuple):
    """The hub's reply to a pull.

    Attributes:
        weights: a reference into the object store, in a tuple of one.
        fresh_optimizer: the worker must reset its inner optimizer, since the hub does not know the rounds it was trained on.
    """

    status: PullStatus
    round_id: RoundId = (-1, -1)
    steps: int = 0
    work: Work | None = None
    weights: tuple[Any, ...] = ()
    dtype: str = ""
    fresh_optimizer: bool = False
    now_s: float = 0.0


class UpdateMessage(NamedTuple):
    """A worker's push, besides the delta. Times are on the hub's clock, as last seen by the worker.

    Attributes:
        begin_s: when the worker had its weights.
        pushed_s: when it began to send.
    """

    worker: int
    incarnation: int
    round_id: RoundId
    begin_s: float
    pushed_s: float
    computed: tuple[ComputeSpan, ...]
    buffers: dict[str, NDArray[Any]]

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
    """The hub's reply to a poll of the driving process.

    Attributes:
        epoch: identifies the hub process.
        events: that the driving process has not seen.
        events_seen: number of events of this hub, including these.
        evaluations: requests that the driving process has not seen.
        workers: incarnation of each registered worker, and whether an update of it was accepted.
        overdue: seconds since the dispatch of each worker that is much slower than before.
        done: the run has its local updates.
        evaluated: no evaluation is outstanding.
        error: that ends the run.
    """

    epoch: int
    events: list[Event]
    events_seen: int
    evaluations: list[EvaluationRequest]
    local_updates: int
    workers: dict[int, tuple[int, bool]]
    overdue: dict[int, float]
    done: bool
    evaluated: bool
    error: Exception | None


@dataclass(frozen=True, kw_only=True)
class HubSettings:
    """What the hub's state machine has to know.

    Attributes:
        plan: the algorithm's dispatch plan, adapted to real machines.
        examples: number of examples of each shard.
        islands: the planned number; steps of the run are local updates over it.
        evaluate_every: local updates between evaluations. The last weights are always evaluated.
        speeds: of the worker slots in steps per second, if given.
    """

    algorithm: AsyncAlgorithm[Any]
    plan: Plan
    examples: tuple[int, ...]
    updates: int
    seed: int
    islands: int
    max_workers: int
    evaluate_every: int
    speeds: tuple[float, ...] = ()
    devices: int = 1


@dataclass(frozen=True, kw_only=True)
class HubProcessSpec:
    """What a hub process is made of.

    Attributes:
        layout, dtype: of the weights.
        workers: number that the start barrier waits for.
        begin_bytes: length of the event log at the start of the run.
        lost: rounds that the event log had after the last checkpoint when this session began.
        session: identifies the driving process. A new session resumes from the saved time, with new workers.
    """

    settings: HubSettings
    layout: Layout
    dtype: str
    workers: int
    save_every_s: float
    begin_bytes: int
    lost: LostRounds
    session: str
    storage: HubStorage
    fingerprint: str
    threads: int
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


def tensors_of(arrays: dict[str, NDArray[Any]]) -> dict[str, Tensor]:
    """Copies."""
    return {name: torch.tensor(array) for name, array in arrays.items()}


def ignore_read_only_warning() -> None:
    """torch cannot mark a tensor as read-only, and warns about arrays from the object store. No process writes to those."""
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
