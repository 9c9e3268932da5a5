"""One step of an elementwise rule, chunk by chunk, with temporaries of one chunk.

A sharded optimizer keeps its slice of the weights in single precision, receives gradients in the precision of the wire, and sends
the new weights in that precision again.

- `preview` computes the new weights as they are sent. It drops the rule's new state with each chunk.
- `step` also keeps the new weights and state: in the old buffers where these are donated, else in new ones.

Both have the bits of `rule.update`, whatever is donated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.core.flat_tree import Tree, empty
from atoll.core.nested_trees import trees_in, with_trees
from atoll.core.protocols import Rule
from atoll.optim.in_place import InPlaceRule, check_layouts

_CHUNK = 1 << 16  # smaller than that of `elementwise`: a slice of a model may be small
_CHUNK_ELSEWHERE = 1 << 22  # on a GPU, where each operation costs a launch
_CHUNKS_ELSEWHERE = 32  # of a large slice
_NOTHING = Tree.of({})


class Stepped(NamedTuple):
    sent: Tree  # the new weights in the precision of the wire
    params: Tree  # the new weights
    state: Any  # of the rule


def preview(
    rule: Rule, params: Tree, gradient: Tree, state: Any, *, over: float = 1.0, times: float = 1.0, sent: torch.dtype | None = None
) -> Tree:
    """The weights after a step with `gradient / over * times`, in the precision `sent` (none: the gradient's).

    Weights and state are only read. The gradient is donated: the new weights lie in its buffer if they have its precision.
    """
    check_layouts(params, gradient, *trees_in(state))
    if _has_fused_kernel(rule, params):
        return _fused_preview(rule, params, gradient, state, over, times, sent)
    new = _sent(gradient, sent or gradient.flat.dtype)
    for (into,), weights, passing in _chunks(rule, params, gradient, state, [new.flat], over, times):
        into.copy_(weights.flat)
        del weights, passing  # before the next chunk's are made
    return new


def step(
    rule: Rule,
    params: Tree,
    gradient: Tree,
    state: Any,
    *,
    over: float = 1.0,
    times: float = 1.0,
    sent: torch.dtype | None = None,
    send: bool = True,
) -> Stepped:
    """`preview` that keeps the new weights and state. Donated weights and state are updated in place. Without `send` the gradient
    stays as it is, and nothing is written for the wire."""
    check_layouts(params, gradient, *trees_in(state))
    if _has_fused_kernel(rule, params):
        own = [tree.claim() if tree.donated else tree.copy() for tree in trees_in((params, state))]
        return _fused(rule, own, gradient, state, over, times, sent, send=send)
    kept = [Tree(t.layout, t.flat if t.donated else empty(t.numel, t.flat.dtype, t.flat.device)) for t in trees_in((params, state))]
    new = _sent(gradient, sent or gradient.flat.dtype) if send else gradient
    outputs = [tree.flat for tree in ([new, *kept] if send else kept)]
    last: Any = state
    for places, *made in _chunks(rule, params, gradient, state, outputs, over, times):
        results = list(trees_in(tuple(made)))
        for place, tree in zip(places, [results[0], *results] if send else results, strict=True):
            place.copy_(tree.flat)
        last = with_trees(made[1], itertools.repeat(_NOTHING))
        del made, results, tree  # before the next chunk's are made
    for tree in trees_in((params, state)):
        if tree.donated:
            tree.claim()  # its buffer holds the new values now
    return Stepped(new, kept[0], with_trees(last, iter(kept[1:])))


def _has_fused_kernel(rule: Rule, params: Tree) -> bool:
    """Whether to step by the rule's `update_in_place`: on a GPU, where the readable form costs a launch per operation, and no bits
    are promised. Not for a large slice, of which it would copy more than a chunk."""
    on_gpu = params.flat.device.type != "cpu"
    return on_gpu and params.numel <= _CHUNK_ELSEWHERE and isinstance(rule, InPlaceRule)


def _fused(
    rule: Any,
    own: list[Tree],
    gradient: Tree,
    state: Any,
    over: float,
    times: float,
    sent: torch.dtype | None,
    *,
    send: bool = True,
) -> Stepped:
    """A step in the buffers `own`, which hold the weights and the state's Trees."""
    slope = gradient.flat.to(own[0].flat.dtype)
    reuses = send and slope is gradient.flat  # the new weights overwrite it anyway
    mean = torch.mul(slope, times / over, out=slope if reuses else None)
    weights, *moments = (tree.donate() for tree in own)
    new, stepped = rule.update_in_place(weights, Tree(own[0].layout, mean), with_trees(state, iter(moments)))
    if not send:
        return Stepped(gradient, new, stepped)
    on_wire = _sent(gradient, sent or gradient.flat.dtype)
    on_wire.flat.copy_(new.flat)
    return Stepped(on_wire, new, stepped)


def _fused_preview(
    rule: Any, params: Tree, gradient: Tree, state: Any, over: float, times: float, sent: torch.dtype | None
) -> Tree:
    """A step in copies of the weights and the state's Trees: one kernel makes all copies. That of the weights lies where it is sent
    from, if it has that precision."""
    on_wire, olds = _sent(gradient, sent or gradient.flat.dtype), list(trees_in((params, state)))
    mean = gradient.flat.to(params.flat.dtype) * (times / over)
    copies = [empty(old.numel, old.flat.dtype, old.flat.device) for old in olds]
    if on_wire.flat.dtype == params.flat.dtype:
        copies[0] = on_wire.flat
    torch._foreach_copy_(copies, [old.flat for old in olds])
    weights, *moments = (Tree(old.layout, copy).donate() for old, copy in zip(olds, copies, strict=True))
    new, _ = rule.update_in_place(weights, Tree(params.layout, mean), with_trees(state, iter(moments)))
    if new.flat.data_ptr() != on_wire.flat.data_ptr():
        on_wire.flat.copy_(new.flat)
    return on_wire


def _sent(gradient: Tree, dtype: torch.dtype) -> Tree:
    """The buffer of the sent weights: the gradient's, if they have its precision."""
    flat = gradient.flat
    if flat.dtype != dtype:
        return Tree(gradient.layout, empty(flat.numel(), dtype, flat.device))
    return gradient.borrow() if gradient.borrowed else Tree(gradient.layout, flat)


def _chunks(
    rule: Rule, params: Tree, gradient: Tree, state: Any, places: list[Tensor], over: float, times: float
) -> Iterator[tuple[list[Tensor], Tree, Any]]:
    """For each chunk: its output windows, its new weights and the rule's new state on it."""
    on_cpu = params.flat.device.type == "cpu"
    dtype, size = params.flat.dtype, _CHUNK if on_cpu else max(_CHUNK_ELSEWHERE, params.numel // _CHUNKS_ELSEWHERE)
    # An island may hold an empty slice; its rule still counts the step.
    olds = zip(*(t.windows(size) or [t] for t in trees_in((params, gradient, state))), strict=True)
    for (weights, slope, *rest), *into in zip(olds, *(torch.split(place, size) for place in places), strict=True):
        mean = slope.cast(dtype) / over
        mean = mean if times == 1.0 else mean.mul_(times)
        yield into, *rule.update(weights, mean, with_trees(state, iter(rest)))
