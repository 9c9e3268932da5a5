"""What memory live tensors take: every storage is noted when it is born and when it dies.

`Storages` is a context in which all of torch's operations are looked at, so that nothing escapes: neither a buffer that lives for
one line, nor one that somebody forgot to let go. It knows what each storage was made for by the place in the source that made it.

>>> import torch
>>> with Storages() as storages:
...     one = torch.zeros(256)
...     two = one + 1
...     del one
...     three = two * 2
>>> storages.live_bytes, storages.peak_bytes
(2048, 2048)

What a backward pass makes is counted apart by itself:

>>> weights = torch.ones(64, requires_grad=True)
>>> with Storages() as storages:
...     loss = weights.square().sum()
...     loss.backward()
>>> storages.peak_bytes < 512 <= storages.apart_peak_bytes      # 256 for the squares; as much for each of their slopes
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

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

import atoll

_HOME = Path(atoll.__file__).parent
_TOOLS = {"tree", "chunks", "storages", "taking", "alone"}
"""Files that make buffers for whoever calls them."""
_NUMBER_BYTES = 8
"""Up to which a storage is a single number, such as a loss, which is counted but not listed as passing."""


class Site(NamedTuple):
    """Where a storage was made.

    Attributes:
        stage: the function of an algorithm that was going on; empty outside of one.
        place: file and function.
    """

    stage: str
    place: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.place}" if self.stage else self.place


@dataclass
class _Live:
    num_bytes: int
    site: Site
    apart: bool
    born: int
    held: bool = False
    """Whether the coroutine that made it has waited since."""


class Passing(NamedTuple):
    """A storage that lived between two waits only."""

    site: Site
    num_bytes: int
    born: int
    died: int


class Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live storages while it is entered. Those that are `apart`, or are born in a backward pass, are counted
    apart."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.apart_peak_bytes = 0
        self.at_peak: Mapping[Site, int] = {}
        """What was alive at the peak, by where it was made."""
        self.passed: list[Passing] = []
        self._bytes = {False: 0, True: 0}
        self._live: dict[int, _Live] = {}
        self._watched: dict[int, Any] = {}
        self._apart = False
        self._passes = ModuleTracker()
        """Tells a backward pass."""
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
                self._note(leaf)
        return result

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is born in here is counted apart: activations, and what else a forward pass needs for itself."""
        before, self._apart = self._apart, True
        try:
            yield
        finally:
            self._apart = before

    def set_apart(self, tensor: Tensor) -> None:
        """This was there before, and is counted apart: a batch."""
        with self.apart():
            self._note(tensor)

    def wait(self) -> None:
        """Something waits: what is alive now is held, and no longer passing."""
        for live in self._live.values():
            live.held = True

    def forget_peak(self) -> None:
        """Begin to look for the peak anew."""
        self.peak_bytes, self.apart_peak_bytes = self._bytes[False], self._bytes[True]
        self.at_peak = self._by_site()
        self.passed = []

    def most_passing(self) -> dict[Site, int]:
        """By place, how many bytes of those that lived between two waits only were alive at a time at most."""
        moments: dict[Site, list[tuple[int, int]]] = {}
        for site, num_bytes, born, died in self.passed:
            moments.setdefault(site, []).extend([(born, num_bytes), (died, -num_bytes)])
        most: dict[Site, int] = {}
        for site, changes in moments.items():
            now = 0
            for _, change in sorted(changes):
                now += change
                most[site] = max(most.get(site, 0), now)
        return dict(sorted(most.items(), key=lambda item: -item[1]))

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or storage.device.type == "meta":
            return
        self._clock += 1
        apart = self._apart or self._passes.is_bw
        live = _Live(storage.nbytes(), _site(sys._getframe(2)), apart, self._clock)
        self._live[key] = live
        self._watched[key] = weakref.ref(storage, lambda _: self._died(key))
        self._bytes[live.apart] += live.num_bytes
        self.apart_peak_bytes = max(self.apart_peak_bytes, self._bytes[True])
        if self._bytes[False] > self.peak_bytes:
            self.peak_bytes, self.at_peak = self._bytes[False], self._by_site()

    def _died(self, key: int) -> None:
        self._clock += 1
        live = self._live.pop(key)
        del self._watched[key]
        self._bytes[live.apart] -= live.num_bytes
        if not live.held and not live.apart and live.num_bytes > _NUMBER_BYTES:
            self.passed.append(Passing(live.site, live.num_bytes, live.born, self._clock))

    def _by_site(self) -> dict[Site, int]:
        sites: Counter[Site] = Counter()
        for live in self._live.values():
            if not live.apart:
                sites[live.site] += live.num_bytes
        return dict(sites.most_common())


def _site(frame: Any) -> Site:
    """The nearest place in atoll that is no tool, and the algorithm's function above it."""
    place = stage = ""
    while frame is not None and not stage:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_HOME):
            name = f"{path.stem}.{frame.f_code.co_name}"
            place = place or (name if path.stem not in _TOOLS else "")
            if path.parent.name == "algorithms" and path.stem != "sharded":
                stage = frame.f_code.co_name.strip("_")
        frame = frame.f_back
    return Site(stage, place or "elsewhere")
