"""Measures the memory that one island needs: it trains among echoes of itself while a tracker records every torch storage.

The peers of that island echo its contributions, in the buffers that a real engine would use. (The simulator runs all islands in one
process and lets them share buffers.) The sum of a reduce-scatter lies in the buffer of a donated tree, and the all-gather that
follows writes into the same buffer. A background exchange alternates with the main coroutine: whenever that computes or waits, the
exchange runs until it waits.

`StorageTracker` is a context that sees all of torch's operations. It records when each storage is allocated and freed, and which
function of atoll allocated it. It counts storages of a backward pass separately.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

import atoll
from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree, empty, free_buffer_pool
from atoll.core.layout import Layout
from atoll.core.protocols import Algorithm, Encoding, Gradient, Mean, Scattered, Weigh, Work
from atoll.engines.shared_and_sharded_state import borrowed, donated, owned
from atoll.optim.adam import AdamW
from atoll.replica.forward_backward import Loss
from atoll.replica.local_replica import InnerRule, LocalReplica
from atoll.replica.master_weights import initial_weights
from atoll.testing.fakes import ScriptedPeers
from decoder_workload import DecoderWorkload

T = TypeVar("T")
_PACKAGE = Path(atoll.__file__).parent
_ALLOCATORS = {"flat_tree", "chunked_elementwise", "in_place"}
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


# ------------------------------------------------------------------------------------------------------------- echoes


class Yield:
    """Awaited where another coroutine may run."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class EchoBackground(Generic[T]):
    """A coroutine that alternates with the main one. Its result can be awaited once, so that no reference to it stays."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine: Coroutine[Any, Any, T] | None = coroutine
        self._result: list[T] = []

    def done(self) -> bool:
        return self._coroutine is None

    def turn(self) -> None:
        """Run until the coroutine waits."""
        if self._coroutine is None:
            return
        try:
            self._coroutine.send(None)
        except StopIteration as end:
            self._coroutine = None
            self._result.append(end.value)

    def __await__(self) -> Generator[None, None, T]:
        while not self.done():
            yield
        return self._result.pop()


class EchoPeers(ScriptedPeers):
    """Peers of the first of `size` islands. Each contributes what this island contributes.

    In an all-gather the slices of the others are unknown here. They repeat this island's slice.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self._background: EchoBackground[Any] | None = None
        self._layout: Layout | None = None
        """Of the last reduce-scatter, and so of the next all-gather."""

    async def mean(self, tree: Tree, weight: float = 1.0, *, compare: bool = False, encoding: Encoding | None = None) -> Mean:
        await Yield()
        return Mean(tree.claim(), weight * self.size, heard=True)

    async def reduce_scatter(
        self, tree: Tree, weight: float = 1.0, *, wide: bool = False, wire: torch.dtype | None = None
    ) -> Scattered:
        buffer = tree.claim(wire)
        await Yield()
        self._layout, finite = buffer.layout, buffer.is_finite()
        mine = buffer.shard(self.rank, self.size)
        if wide and mine.wide() is not mine:  # what is summed in single precision does not fit into what travelled
            return Scattered(mine.wide() * self.size, weight * self.size, finite)
        mine.flat.mul_(self.size)
        return Scattered(mine, weight * self.size, finite)

    async def all_gather(self, shard: Tree) -> Tree:
        await Yield()
        assert self._layout is not None, "all_gather before reduce_scatter"
        numel, flat = self._layout.numel, shard.flat
        if flat.untyped_storage().nbytes() == numel * flat.element_size():  # a view of the communication buffer
            whole = torch.empty(0, dtype=flat.dtype, device=flat.device).set_(flat.untyped_storage(), 0, (numel,), (1,))
        else:
            whole = empty(numel, flat.dtype, flat.device)
            whole[: flat.numel()].copy_(flat)
        for start in range(flat.numel(), numel, max(1, flat.numel())):
            rest = whole[start : start + flat.numel()]
            rest.copy_(whole[: rest.numel()])
        return Tree(self._layout, whole)

    async def total(self, number: float) -> float:
        await Yield()
        return number * self.size

    def background(self, coroutine: Coroutine[Any, Any, T], /) -> EchoBackground[T]:
        if self._background is not None and not self._background.done():
            coroutine.close()
            raise ExchangeFailed("a background exchange is open already. Await it before the next.")
        self._background = exchange = EchoBackground(coroutine)
        exchange.turn()
        return exchange

    def turn(self) -> None:
        """Called whenever the main coroutine waits."""
        if self._background is not None:
            self._background.turn()


class EchoReplica:
    """The island's model. The background exchange runs before and after each computation, so that both are in progress at once."""

    def __init__(self, replica: LocalReplica) -> None:
        self.replica = replica

    def load(self, params: Tree) -> None:
        self.replica.load(params)

    def params(self) -> Tree:
        return self.replica.borrowed()

    async def train(self, steps: int, work: Work) -> int:
        await Yield()
        result = self.replica.train(steps, work)
        await Yield()
        return result.tokens

    async def gradient(
        self,
        work: Work,
        *,
        at: Tree | None = None,
        onto: Gradient | None = None,
        weigh: Weigh = "batches",
        wide: bool = False,
    ) -> Gradient:
        await Yield()
        gradient, _ = self.replica.gradient(work, at=at, onto=onto, weigh=weigh, wide=wide)
        await Yield()
        return gradient


def run_alternating(coroutine: Coroutine[Any, Any, T], peers: EchoPeers, waits: Callable[[], None] | None = None) -> T:
    """Run a coroutine to its end, alternating with its background exchange. `waits` is called whenever either waits."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        for turn in (waits, peers.turn, waits):
            if turn is not None:
                turn()


# ------------------------------------------------------------------------------------------------- an island's peak memory


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
    """Bytes that a device's allocator has allocated, the workspace of its libraries included; None on a CPU."""
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
