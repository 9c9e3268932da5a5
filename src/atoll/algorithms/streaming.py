"""Streaming DiLoCo: agree on one fragment of the model at a time, while training goes on.

Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, Algorithm 2.

The model is cut into fragments. Each fragment is agreed on once every `inner_steps` steps, at its own offset: an island sends its
delta, trains on for `overlap` steps, and then takes the outer step along the mean and loads the fragment. So the peak bandwidth is
that of one fragment, and islands do not wait while a fragment travels. What an island did to a fragment in the meantime is dropped,
or mixed with the new weights.

    paper   H             P           tau       alpha    theta_p                         Delta_p
    here    inner_steps   fragments   overlap   mixing   fragment p of replica.params()   delta

The fragments of a round are sent `inner_steps / fragments` steps apart, the last so that its outer step ends the round. If
`overlap` is longer than that distance, several fragments travel at a time, the first is sent at the start of the round, and the
last are loaded in the next round. An island waits for their means at the end of the round and takes their outer steps there, so
that what is saved between two rounds is the whole algorithm.
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
Action = Literal["send", "receive", "load"]


@dataclass(frozen=True)
class StreamingState:
    """All that the algorithm remembers between rounds."""

    params: Tree = shared(donated=True)
    """The global weights: of each fragment those after its last outer step."""
    outer: tuple[Any, ...] = shared(donated=True)
    """The outer rule's state of each fragment."""
    local: Tree | None = own()
    """The weights that this island's replica held at the end of its last round."""
    unsent: tuple[Tree | None, ...] = own((), residual=True)
    """The error buffer of each fragment: see `DiLoCo`."""
    unloaded: tuple[int, ...] = own(())
    """Fragments of `params` that this island loads during the next round: it sent them less than `overlap` steps ago."""


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """DiLoCo with fragments that travel during training.

    Args:
        inner_steps: steps between two agreements on a fragment; the paper uses 100.
        fragments: number of fragments; with 1 and no overlap this is DiLoCo.
        overlap: steps between sending a fragment's delta and loading the agreed weights. The paper advises 1 to 5.
        mixing: the share of the island's own weights in the fragment that it loads: 0 drops the steps that it took after it sent
            the fragment, 1 ignores the agreement.
        split: fragments are `contiguous` ranges of equal size, whole tensors `balanced` by size, or whole layers, `strided`: with
            the embeddings and the other tensors outside of layers as one fragment, layers p, p+P, p+2P and so on as another.
        outer: the rule applied to each fragment's mean delta.
        codec: how deltas travel, by `atoll.optim.codecs`: as `fp32`, `bf16`, `bf16-stochastic`, `int8`, `int4`, `fp4`, `int2` or
            `topk`.
        feedback: how much of what the codec left out is added to the fragment's next delta: 1 all of it, 0 none.
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
        if self.overlap == self.inner_steps and self.mixing == 0:
            raise ConfigError(
                f"overlap={self.overlap} with mixing=0: an island drops the steps that it takes while a fragment travels, and with "
                f"inner_steps={self.inner_steps} these are all of its steps. Use a shorter overlap, or a mixing above 0."
            )
        if not 0 <= self.mixing <= 1:
            raise ConfigError(f"mixing={self.mixing}: it is a share from 0 to 1. Use 0 to load what was agreed on.")
        check_feedback(self.feedback)

    @property
    def steps_per_round(self) -> int:
        return self.inner_steps

    def init(self, params: Tree, peers: Peers) -> StreamingState:
        return StreamingState(params, tuple(self.outer.init(params.select(each).writable()) for each in self._ranges(params)))

    async def round(self, state: StreamingState, replica: Replica, peers: Peers) -> StreamingState:
        work, done = peers.work(self.inner_steps), 0
        state = await peers.catch_up(state)
        state = replace(state, params=state.params.writable())  # its fragments are replaced one by one
        replica.load(state.params if state.local is None else state.local)
        flights: dict[int, Awaitable[Mean]] = {}
        unloaded = state.unloaded
        for step, action, fragment in self._schedule():
            if step > done:
                await replica.train(step - done, work.after(done))
                done = step
            if action == "send":
                encoding = encoding_of(self.codec, work.after(step), peers)
                exchange = peers.mean(self._delta(state, replica, fragment), compare=True, encoding=encoding)
                flights[fragment] = peers.background(exchange) if self.overlap else exchange
            elif action == "receive":
                mean = await flights.pop(fragment)
                if mean.heard and mean.weight:  # else the island trains on with its own weights
                    state, unloaded = self._outer_step(state, fragment, mean), (*unloaded, fragment)
            elif fragment in unloaded:
                self._load(state, replica, fragment)
                unloaded = tuple(other for other in unloaded if other != fragment)
        return replace(state, local=replica.params(), unloaded=unloaded)

    def _delta(self, state: StreamingState, replica: Replica, fragment: int) -> Tree:
        ranges = self._ranges(state.params)[fragment]
        delta = state.params.select(ranges) - replica.params().select(ranges)
        unsent = state.unsent[fragment] if state.unsent else None
        return delta if unsent is None else delta.wide().add_(unsent, self.feedback)

    def _load(self, state: StreamingState, replica: Replica, fragment: int) -> None:
        ranges = self._ranges(state.params)[fragment]
        new = state.params.select(ranges)
        replica.load(new.lerp(replica.params().select(ranges), self.mixing) if self.mixing else new)

    def agreed(self, state: StreamingState, number: int, mean: Mean) -> StreamingState:
        if not mean.weight:
            return state
        return self._outer_step(replace(state, params=state.params.writable()), number, mean)

    def _outer_step(self, state: StreamingState, fragment: int, mean: Mean) -> StreamingState:
        """The outer step of a fragment, whose new weights are written into `state.params`."""
        ranges = self._ranges(state.params)[fragment]
        new, outer = self.outer.update(state.params.select(ranges), mean.value, state.outer[fragment])
        state.params.paste_(new)
        unsent = state.unsent or (None,) * self.fragments if self.codec != "fp32" and self.feedback else ()
        if unsent and mean.unsent is not None:
            unsent = _with(unsent, fragment, mean.unsent)
        return replace(state, outer=_with(state.outer, fragment, outer), unsent=unsent)

    def _schedule(self) -> list[tuple[int, Action, int]]:
        """What an island does in a round, in order, with which fragment, and after which step. A fragment is received when it is
        due, or at the end of the round. Of one step, a fragment is loaded before another is sent, as far as they differ."""
        actions: list[tuple[int, Action, int]] = []
        for fragment, sent in enumerate(self.offsets):
            due, end = sent + self.overlap, self.inner_steps
            actions += [(sent, "send", fragment), (min(due, end), "receive", fragment)]
            actions.append((due if due <= end else due - end, "load", fragment))
        order = ["receive", "load", "send"] if self.overlap else ["send", "receive", "load"]
        return sorted(actions, key=lambda each: (each[0], order.index(each[1]), each[2]))

    @property
    def offsets(self) -> tuple[int, ...]:
        """The step of a round after which each fragment is sent.

        >>> Streaming(inner_steps=100, overlap=5).offsets, Streaming(inner_steps=100, overlap=50).offsets
        ((20, 45, 70, 95), (0, 25, 50, 75))
        """
        steps, count = self.inner_steps, self.fragments
        if self.overlap * count <= steps:
            return tuple(steps * (number + 1) // count - self.overlap for number in range(count))
        return tuple(steps * number // count for number in range(count))

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
