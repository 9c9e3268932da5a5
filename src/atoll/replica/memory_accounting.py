"""What an island holds in memory, by what it is for; and what the papers say that it should.

Counted are live tensors, each storage once, however many views there are of it:

    parameters      the module's weights, and what buffers it has
    gradients       those of the module, and those that wait in a State or are being added up
    communication   what travels, and what an exchange brought
    optimizer       master weights and moments, in the State (sharded or not) or in the replica
    copies          what an algorithm whose replicas train keeps besides: global weights, outer momentum
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero1 import ZeRO1
from atoll.core.chunked_elementwise import trees_in
from atoll.core.errors import TreeGivenAway
from atoll.core.events import MEMORY_KINDS
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Gradient
from atoll.replica.local_replica import LocalReplica

STATE = "state"
"""Of what lies in a State, until it is known whether the replica trains: the optimizer's, or copies."""

Storages = dict[int, tuple[str, int]]
"""What is held: for each storage its kind and its bytes."""


def add_storages(holding: Storages, value: Any, kind: str, named: frozenset[str] = frozenset()) -> None:
    """Add the storages in a nested value. What is known already stays what it is.

    Args:
        holding: what is added to.
        value: Trees, tensors, and tuples, lists, mappings and dataclasses of them; anything else holds nothing.
        kind: of what is found, but that gradients are known by their type.
        named: names of a State's fields; what goes by one of these, in any record, is a State's.
    """
    for found, tensor in _tensors(value, kind, named):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            holding.setdefault(storage.data_ptr(), (found, storage.nbytes()))


def _tensors(value: Any, kind: str, named: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tree):
        with suppress(TreeGivenAway):  # asked for at once: a replica that computes beside may take it at any moment
            yield kind, value.flat
    elif isinstance(value, Tensor):
        yield kind, value
    elif isinstance(value, Gradient):
        yield from _tensors(value.sum, "gradients", named)
    elif isinstance(value, Mapping):
        yield from _records(value.items(), kind, named)
    elif hasattr(value, "_fields"):
        yield from _records(zip(value._fields, value, strict=True), kind, named)
    elif isinstance(value, tuple | list):
        yield from _records((("", item) for item in value), kind, named)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _records(((field.name, getattr(value, field.name)) for field in fields(value)), kind, named)


def _records(items: Iterable[tuple[Any, Any]], kind: str, named: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    for name, item in items:
        yield from _tensors(item, STATE if name in named else kind, named)


def add_replica(holding: Storages, replica: LocalReplica) -> None:
    """Add what a replica holds. Not while it computes."""
    for kind, tensors in replica.tensors().items():
        add_storages(holding, tensors, kind)
    if replica.row is not None:  # a part of a storage, which is all islands' together
        address, num_bytes = replica.row
        holding.setdefault(address, ("gradients", num_bytes))


def total_bytes(holding: Storages) -> int:
    return sum(num_bytes for _, num_bytes in holding.values())


def by_kind(holding: Storages, *, trains: bool) -> dict[str, int]:
    """Bytes of each kind."""
    sums = dict.fromkeys(MEMORY_KINDS, 0)
    for kind, num_bytes in holding.values():
        sums[kind if kind != STATE else "copies" if trains else "optimizer"] += num_bytes
    return sums


# ------------------------------------------------------------------------------------------------------- what papers say


@dataclass(frozen=True)
class MemoryFormula:
    """What an algorithm takes by ACCO's paper (arXiv 2406.02613, Table 1), in bytes a parameter.

    Attributes:
        text: the sum, such as 2+2+2+12/4: weights, gradients, communication buffer, and the optimizer's share; where replicas
            train, two copies of the weights last.
        per_param: what it comes to.
    """

    text: str
    per_param: float


def paper_formula(algorithm: Any, replica: LocalReplica, islands: int) -> MemoryFormula | None:
    """The paper's formula with this run's own widths; none of an algorithm that the paper does not have.

    The paper has weights of 2 bytes and an optimizer of 12: masters in single precision and Adam's two moments. Here weights have
    the module's width, and an optimizer has 4 bytes for masters and 4 for each of its moments. A module in single precision that
    is trained is its own master.
    """
    width = replica.weights.layout.dtype.itemsize
    if isinstance(algorithm, DiLoCo):
        optimizer = 4 * _moments(replica.rule) + (4 if width < 4 else 0)
        return MemoryFormula(f"{width}+{width}+{optimizer}+2*{width}", 4 * width + optimizer)
    if not isinstance(algorithm, DDP | ZeRO1 | ACCO | DPU | WP):
        return None
    optimizer = 4 + 4 * _moments(algorithm.rule)
    if isinstance(algorithm, DDP):
        return MemoryFormula(f"{width}+{width}+{optimizer}", 2 * width + optimizer)
    gradients = width + 4 if algorithm.sums == "fp32" and width < 4 else width  # added up beside the module's own
    travelling = {"own": width, "bf16": 2, "fp32": 4}[algorithm.wire]
    buffer = [] if isinstance(algorithm, ZeRO1) and travelling == width else [travelling]  # ZeRO-1's gradients travel as they lie
    whole = [width, gradients, *buffer]
    return MemoryFormula("+".join(map(str, whole)) + f"+{optimizer}/{islands}", sum(whole) + optimizer / islands)


def _moments(rule: Any) -> int:
    """How many numbers an optimizer remembers of each weight."""
    return sum(1 for _ in trees_in(rule.init(Tree.of({}))))
