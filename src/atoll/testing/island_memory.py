"""Measures the memory that one island needs: it trains among echoes of itself while a tracker records every torch storage.

`StorageTracker` is a context that sees all of torch's operations. It records when each storage is allocated and freed, and which
function of atoll allocated it.

>>> with StorageTracker() as tracker:
...     one = torch.zeros(256)
...     two = one + 1
...     del one
...     three = two * 2
>>> tracker.live_bytes, tracker.peak_bytes
(2048, 2048)

Storages of a backward pass are excluded from these counts:

>>> weights = torch.ones(64, requires_grad=True)
>>> with StorageTracker() as tracker:
...     loss = weights.square().sum()
...     loss.backward()
>>> tracker.peak_bytes < 512 <= tracker.excluded_peak_bytes      # 256 for the squares, and 256 for each of their gradients
True
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

import atoll
from atoll.core.flat_tree import free_buffer_pool
from atoll.core.protocols import Algorithm
from atoll.engines.replicated_state import borrowed, donated, owned
from atoll.models.gpt import GPT, Decoder
from atoll.optim.adam import AdamW
from atoll.replica.forward_backward import Loss
from atoll.replica.local_replica import InnerRule, LocalReplica
from atoll.replica.master_weights import initial_weights
from atoll.testing.echo_peers import EchoPeers, EchoReplica, run_alternating

_PACKAGE = Path(atoll.__file__).parent
_ALLOCATORS = {"flat_tree", "chunked_elementwise", "in_place", "echo_peers"}
"""Modules that allocate buffers for their callers. A storage is attributed to the caller."""
_SCALAR_BYTES = 8
"""Storages up to this size, such as a loss, are counted but not listed as transient."""


# ------------------------------------------------------------------------------------------------------ storage tracking


class AllocationSite(NamedTuple):
    """Where a storage was allocated: the algorithm's function (empty outside of one), and file.function."""

    stage: str
    place: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.place}" if self.stage else self.place


@dataclass
class _LiveStorage:
    num_bytes: int
    site: AllocationSite
    excluded: bool
    born: int
    retained: bool = False
    """Whether it outlived a wait of the coroutine that allocated it."""


class TransientStorage(NamedTuple):
    """A storage that was allocated and freed between two waits."""

    site: AllocationSite
    num_bytes: int
    born: int
    died: int


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live storages. Those allocated in `excluded()` or in a backward pass are counted separately."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.excluded_peak_bytes = 0
        self.at_peak: Mapping[AllocationSite, int] = {}
        """Bytes that were alive at the peak, by site."""
        self.transient: list[TransientStorage] = []
        self._bytes = {False: 0, True: 0}
        self._live: dict[int, _LiveStorage] = {}
        self._finalizers: dict[int, Any] = {}
        self._excluding = False
        self._backward = ModuleTracker()
        self._clock = 0

    @property
    def live_bytes(self) -> int:
        return self._bytes[False]

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._track(leaf)
        return result

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Storages allocated in this context are counted separately: activations and other memory of a forward pass."""
        before, self._excluding = self._excluding, True
        try:
            yield
        finally:
            self._excluding = before

    def exclude(self, tensor: Tensor) -> None:
        """Count an existing tensor, such as a batch, separately."""
        with self.excluded():
            self._track(tensor)

    def wait(self) -> None:
        """A coroutine waits: storages that are alive now are no longer transient."""
        for live in self._live.values():
            live.retained = True

    def reset_peak(self) -> None:
        self.peak_bytes, self.excluded_peak_bytes = self._bytes[False], self._bytes[True]
        self.at_peak = self._by_site()
        self.transient = []

    def peak_transient_bytes(self) -> dict[AllocationSite, int]:
        """By site, the most bytes of transient storages that were alive at one time."""
        changes_by_site: dict[AllocationSite, list[tuple[int, int]]] = {}
        for site, num_bytes, born, died in self.transient:
            changes_by_site.setdefault(site, []).extend([(born, num_bytes), (died, -num_bytes)])
        peaks: dict[AllocationSite, int] = {}
        for site, changes in changes_by_site.items():
            now = 0
            for _, change in sorted(changes):
                now += change
                peaks[site] = max(peaks.get(site, 0), now)
        return dict(sorted(peaks.items(), key=lambda item: -item[1]))

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or storage.device.type == "meta":
            return
        self._clock += 1
        excluded = self._excluding or self._backward.is_bw
        live = _LiveStorage(storage.nbytes(), _site(sys._getframe(2)), excluded, self._clock)
        self._live[key] = live
        self._finalizers[key] = weakref.ref(storage, lambda _: self._freed(key))
        self._bytes[excluded] += live.num_bytes
        self.excluded_peak_bytes = max(self.excluded_peak_bytes, self._bytes[True])
        if self._bytes[False] > self.peak_bytes:
            self.peak_bytes, self.at_peak = self._bytes[False], self._by_site()

    def _freed(self, key: int) -> None:
        self._clock += 1
        live = self._live.pop(key)
        del self._finalizers[key]
        self._bytes[live.excluded] -= live.num_bytes
        if not live.retained and not live.excluded and live.num_bytes > _SCALAR_BYTES:
            self.transient.append(TransientStorage(live.site, live.num_bytes, live.born, self._clock))

    def _by_site(self) -> dict[AllocationSite, int]:
        sites: Counter[AllocationSite] = Counter()
        for live in self._live.values():
            if not live.excluded:
                sites[live.site] += live.num_bytes
        return dict(sites.most_common())


def _site(frame: Any) -> AllocationSite:
    """The nearest function of atoll outside of `_ALLOCATORS`, and the algorithm's function above it."""
    place = stage = ""
    while frame is not None and not stage:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            name = f"{path.stem}.{frame.f_code.co_name}"
            place = place or (name if path.stem not in _ALLOCATORS else "")
            if path.parent.name == "algorithms" and path.stem != "sharded_optimizer":
                stage = frame.f_code.co_name.strip("_")
        frame = frame.f_back
    return AllocationSite(stage, place or "elsewhere")


# ------------------------------------------------------------------------------------------------- an island's peak memory


@dataclass(frozen=True)
class RepeatedBatch:
    """Returns one batch at every position, so that no step allocates a new one."""

    tokens_of_a_batch: Tensor
    num_shards: int = 1

    def examples(self, shard: int) -> int:
        return len(self.tokens_of_a_batch)

    def batch(self, shard: int, position: int) -> Tensor:
        return self.tokens_of_a_batch

    def tokens(self, batch: Tensor) -> int:
        return batch[:, 1:].numel()


@dataclass(frozen=True)
class DecoderWorkload:
    """A decoder that reads small batches, so that its weights take most of the memory."""

    model: GPT
    batches: RepeatedBatch
    vocab_size: int = 2048
    seq_len: int = 8

    @staticmethod
    def of(model: GPT, *, vocab_size: int = 2048, seq_len: int = 8, device: str = "cpu") -> DecoderWorkload:
        """A workload of two random sequences."""
        tokens = torch.randint(vocab_size, (2, seq_len + 1), generator=torch.Generator().manual_seed(0))
        return DecoderWorkload(model, RepeatedBatch(tokens.to(device)), vocab_size, seq_len)

    def module(self) -> Decoder:
        return self.model.build(self.vocab_size, self.seq_len, seed=0)

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(module, Decoder)
        return module.loss(batch)

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        return {"loss": float(self.loss(module, self.batches.tokens_of_a_batch))}


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """The peak memory of an island over some rounds, in bytes.

    Attributes:
        params: number of trainable parameters.
        peak_bytes: of all live storages that are not excluded.
        excluded_bytes: peak of batches, activations and other memory of forward and backward passes.
        at_peak: bytes alive at the peak, by site.
        transient: by site, the peak of storages that lived between two waits only.
        device_bytes: peak of the device's allocator; None on a CPU.
    """

    params: int
    peak_bytes: int
    excluded_bytes: int
    at_peak: Mapping[AllocationSite, int]
    transient: Mapping[AllocationSite, int]
    device_bytes: int | None = None

    @property
    def per_param(self) -> float:
        return self.peak_bytes / self.params


def measure_peak_memory(
    algorithm: Algorithm[Any],
    workload: DecoderWorkload,
    *,
    size: int,
    rounds: int = 3,
    inner: InnerRule | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    device: str = "cpu",
    may_fail: bool = False,
) -> PeakMemory:
    """The peak of one of `size` islands after its first round, which may only start an exchange.

    If rounds may fail, the State before a round stays alive until the round is over. Else the round may reuse its buffers.
    """
    free_buffer_pool()
    before_bytes = _allocated_bytes(device)
    tracker = StorageTracker()
    tracker.exclude(workload.batches.tokens_of_a_batch)
    with tracker:
        loss = _excluded_loss(workload, tracker)
        replica = LocalReplica(workload, optimizer=inner or AdamW(), dtype=dtype, devices=(device,), loss=loss)
        peers, params = EchoPeers(size), replica.weights.layout.numel
        state = _initial_state(algorithm, workload, replica, peers, dtype)
        for number in range(rounds):
            if number == 1:
                tracker.reset_peak()
                if before_bytes is not None:
                    torch.cuda.reset_peak_memory_stats()
            before = borrowed(state) if may_fail else donated(state)
            state = owned(run_alternating(algorithm.round(before, EchoReplica(replica), peers), peers, tracker.wait))
    free_buffer_pool()
    return PeakMemory(
        params=params,
        peak_bytes=tracker.peak_bytes,
        excluded_bytes=tracker.excluded_peak_bytes,
        at_peak=tracker.at_peak,
        transient=tracker.peak_transient_bytes(),
        device_bytes=None if before_bytes is None else torch.cuda.max_memory_allocated() - before_bytes,
    )


def _initial_state(
    algorithm: Algorithm[Any], workload: DecoderWorkload, replica: LocalReplica, peers: EchoPeers, dtype: Any
) -> Any:
    """The first State. A function, so that no local variable keeps the initial weights alive."""
    params = initial_weights(workload, replica.device, dtype)
    replica.load(params)
    return algorithm.init(params, peers)


def _allocated_bytes(device: str) -> int | None:
    """Bytes that a device's allocator has handed out, the workspace of its libraries included; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    some = torch.ones(64, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    torch.autograd.grad((some @ some).sum(), some)  # on both of autograd's threads, which have a workspace each
    del some
    return torch.cuda.memory_allocated()


def _excluded_loss(workload: DecoderWorkload, tracker: StorageTracker) -> Loss:
    """The workload's loss, with the storages of its forward pass excluded."""

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        with tracker.excluded():
            return workload.loss(module, batch)

    return loss
