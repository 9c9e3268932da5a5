"""Streaming DiLoCo: agree on one fragment of the model at a time, while training goes on.

Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, Algorithm 2.

The model is cut into fragments. Each fragment is agreed on once every `inner_steps` steps, at its own offset: an island sends its
delta, trains on for `overlap` steps, and then takes the outer step along the mean and loads the fragment. So the peak bandwidth is
that of one fragment, and islands do not wait while a fragment travels. What an island did to a fragment in the meantime is dropped,
or mixed with the new weights.

    paper   H             P           tau       alpha    theta_p                         Delta_p
    here    inner_steps   fragments   overlap   mixing   fragment p of replica.params()   delta

Within a round the offsets are even: `inner_steps / fragments` steps apart, the last fragment arriving at the end of the round. If
`overlap` is longer than that, the first fragment leaves at the start of the round and the others at even distances, so several are
under way at a time. No fragment travels across the end of a round: what is saved there is the whole algorithm.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from atoll.core.config.type_checks import check_types
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.layout import Layout, shard_range
from atoll.core.protocols import Mean, Peers, Replica, Rule, own, shared
from atoll.optim.codecs import CodecName, check_feedback, encoding_of
from atoll.optim.sgd import Nesterov

FragmentSplit = Literal["contiguous", "balanced", "strided"]
FragmentRanges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class StreamingState:
    """All that the algorithm remembers between rounds."""

    params: Tree = shared(donated=True)
    """Of each fragment, the weights of its last agreement."""
    outer: tuple[Any, ...] = shared(donated=True)
    """The outer rule's state of each fragment."""
    local: Tree | None = own()
    """This island's weights: between two agreements on a fragment they are its own."""
    unsent: tuple[Tree | None, ...] = own(())
    """What the codec has left out of this island's deltas so far, by fragment."""


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """DiLoCo with fragments that travel during training.

    Args:
        inner_steps: steps between two agreements on a fragment; the paper uses 100.
        fragments: number of fragments; with 1 and no overlap this is DiLoCo.
        overlap: steps between sending a fragment's delta and taking its outer step. The paper advises 1 to 5.
        mixing: the share of the island's own weights in the fragment that it loads: 0 drops the steps it took meanwhile, 1 ignores
            the agreement.
        split: fragments are `contiguous` ranges of equal size, whole tensors `balanced` by size, or whole layers, `strided`: with
            the embeddings and the other tensors outside of layers as one fragment, layers p, p+P, p+2P ... as another.
        outer: the rule applied to each fragment's mean delta.
        codec, feedback: see `DiLoCo`.
    """

    inner_steps: int
    fragments: int = 4
    overlap: int = 1
    mixing: float = 0.0
    split: FragmentSplit = "contiguous"
    outer: Rule = Nesterov(lr=0.4, momentum=0.9)
    codec: CodecName = "fp32"
    feedback: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        if self.fragments < 1 or self.inner_steps < self.fragments:
            raise ConfigError(
                f"fragments={self.fragments} with inner_steps={self.inner_steps}: there is at least 1 fragment, and a step for "
                f"each. Use at most {max(1, self.inner_steps)}."
            )
        if not 0 <= self.overlap <= self.inner_steps:
            raise ConfigError(
                f"overlap={self.overlap}: a fragment travels for 0 to inner_steps={self.inner_steps} steps. Use 0 to wait for it."
            )
        if not 0 <= self.mixing <= 1:
            raise ConfigError(f"mixing={self.mixing}: it is a share from 0 to 1. Use 0 to load what was agreed on.")
        check_feedback(self.feedback)

    @property
    def steps_per_round(self) -> int:
        return self.inner_steps

    def init(self, params: Tree, peers: Peers) -> StreamingState:
        return StreamingState(params, tuple(self.outer.init(params.select(each).copy()) for each in self._ranges(params)))

    async def round(self, state: StreamingState, replica: Replica, peers: Peers) -> StreamingState:
        work, done = peers.work(self.inner_steps), 0
        state = await peers.catch_up(state)
        state = replace(state, params=state.params.copy())  # once a round; its fragments are then replaced one by one
        replica.load(state.params if state.local is None else state.local)
        flights: dict[int, Awaitable[Mean]] = {}
        for step, sends, fragment in self._calendar():
            if step > done:
                await replica.train(step - done, replace(work, start=work.start + done, schedule=work.schedule + done))
                done = step
            if sends:
                encoding = encoding_of(self.codec, replace(work, schedule=work.schedule + step), peers)
                exchange = peers.mean(self._delta(state, replica, fragment), compare=True, encoding=encoding)
                flights[fragment] = peers.background(exchange) if self.overlap else exchange
            else:
                state = self._arrived(state, replica, fragment, await flights.pop(fragment))
        return replace(state, local=replica.params())

    def _delta(self, state: StreamingState, replica: Replica, fragment: int) -> Tree:
        ranges = self._ranges(state.params)[fragment]
        delta = state.params.select(ranges) - replica.params().select(ranges)
        unsent = state.unsent[fragment] if state.unsent else None
        return delta if unsent is None else delta.add_(unsent, self.feedback)

    def _arrived(self, state: StreamingState, replica: Replica, fragment: int, mean: Mean) -> StreamingState:
        """The outer step of a fragment. An island that missed the exchange trains on with its own weights."""
        if not (mean.heard and mean.weight):
            return state
        ranges = self._ranges(state.params)[fragment]
        new, outer = self.outer.update(state.params.select(ranges).copy(), mean.value, state.outer[fragment])
        replica.load(new if self.mixing == 0 else new.lerp(replica.params().select(ranges), self.mixing))
        state.params.paste_(new)
        unsent = _with(state.unsent or (None,) * self.fragments, fragment, mean.unsent if self.feedback else None)
        return replace(state, outer=_with(state.outer, fragment, outer), unsent=unsent if self.codec != "fp32" else ())

    def _calendar(self) -> list[tuple[int, bool, int]]:
        """What happens in a round, in order: the step, whether a fragment is sent or arrives, and which one. An island loads a
        fragment that arrives before it sends another."""
        sent = [(step, True, fragment) for fragment, step in enumerate(self.offsets)]
        arrived = [(step + self.overlap, False, fragment) for step, _, fragment in sent]
        return sorted([*sent, *arrived], key=lambda event: (event[0], event[1] == bool(self.overlap), event[2]))

    @property
    def offsets(self) -> tuple[int, ...]:
        """The step of a round after which each fragment is sent.

        >>> Streaming(inner_steps=100, overlap=5).offsets, Streaming(inner_steps=100, overlap=50).offsets
        ((20, 45, 70, 95), (0, 16, 33, 50))
        """
        last, count = self.inner_steps - self.overlap, self.fragments
        if self.overlap * count <= self.inner_steps:
            return tuple(self.inner_steps * (number + 1) // count - self.overlap for number in range(count))
        return tuple(last * number // max(1, count - 1) for number in range(count))

    def _ranges(self, params: Tree) -> tuple[FragmentRanges, ...]:
        return fragment_ranges(params.layout, self.fragments, self.split)


def _with(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


@lru_cache(maxsize=64)
def fragment_ranges(layout: Layout, fragments: int, split: FragmentSplit) -> tuple[FragmentRanges, ...]:
    """Where each fragment lies in the buffer."""
    if split == "contiguous":
        found: list[list[tuple[int, int]]] = [[shard_range(layout.numel, number, fragments)] for number in range(fragments)]
    else:
        owner = _balanced(layout, fragments) if split == "balanced" else _strided(layout, fragments)
        found = [[] for _ in range(fragments)]
        for piece, at in layout.offsets.items():
            ranges, stop = found[owner[piece]], at + layout.index[piece].count
            if ranges and ranges[-1][1] == at:
                ranges[-1] = ranges[-1][0], stop
            else:
                ranges.append((at, stop))
    if any(not sum(stop - start for start, stop in ranges) for ranges in found):
        raise ConfigError(
            f"fragments={fragments} with split={split}: a model of {len(layout.pieces)} tensors leaves a fragment empty. Use fewer "
            f"fragments, or split=contiguous."
        )
    return tuple(map(tuple, found))


def _balanced(layout: Layout, fragments: int) -> dict[str, int]:
    """Tensors in their order, cut where the sum of sizes comes closest to even parts."""
    owner, at = {}, 0
    for piece in layout.pieces:
        owner[piece.name] = min(fragments - 1, (2 * at + piece.count) * fragments // (2 * max(1, layout.numel)))
        at += piece.count
    return owner


def _strided(layout: Layout, fragments: int) -> dict[str, int]:
    """Fragment 0 has what lies in no layer; layer n is in fragment 1 + n mod (fragments - 1). With one fragment, all are in it."""
    layers = {piece.name: re.search(r"\.(\d+)\.", f".{piece.name}") for piece in layout.pieces}
    others = max(1, fragments - 1)
    return {name: 0 if found is None or fragments == 1 else 1 + int(found[1]) % others for name, found in layers.items()}
