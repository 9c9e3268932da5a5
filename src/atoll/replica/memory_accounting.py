"""An island's memory by kind, counted and by the formulas of the papers.

Live tensors count, each storage once, however many views it has:

    parameters      the module's weights and buffers
    gradients       of the module, pending in a State, or being accumulated
    communication   buffers to send, and results of exchanges
    optimizer       master weights and moments, in the State (sharded or not) or in the replica
    copies          what an algorithm keeps besides if its replicas train: global weights, outer momentum
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import TreeDonated
from atoll.core.events import MEMORY_KINDS
from atoll.core.flat_tree import Tree
from atoll.core.nested_trees import items_in, trees_in
from atoll.core.protocols import Gradient
from atoll.optim.torch_optimizers import TorchRule
from atoll.replica.local_replica import LocalReplica

STATE = "state"  # kind of a State's tensors, until it is known whether the replica trains (copies) or not (optimizer)

Storages = dict[int, tuple[str, int]]  # kind and bytes of each storage, by its address


def add_storages(storages: Storages, value: Any, kind: str, named: frozenset[str] = frozenset()) -> None:
    """Adds the storages of the Trees and tensors in a nested value. Each storage keeps the kind it was first added with: `kind`,
    except for gradients, which have a type of their own, and for values of the State's field names `named`, in any record."""
    for found, tensor in _tensors(value, kind, named):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages.setdefault(storage.data_ptr(), (found, storage.nbytes()))


def _tensors(value: Any, kind: str, named: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tree):
        with suppress(TreeDonated):  # a replica that computes in another thread may take the buffer at any moment
            yield kind, value.flat
    elif isinstance(value, Tensor):
        yield kind, value
    elif isinstance(value, Gradient):
        yield from _tensors(value.sum, "gradients", named)
    else:
        for name, item in items_in(value) or ():
            yield from _tensors(item, STATE if name in named else kind, named)


def add_replica(storages: Storages, replica: LocalReplica) -> None:
    """Adds the storages of a replica that is not computing."""
    for kind, tensors in replica.tensors().items():
        add_storages(storages, tensors, kind)
    if replica.stack_row is not None:  # a row of the storage that all islands share
        address, num_bytes = replica.stack_row
        storages.setdefault(address, ("gradients", num_bytes))


def total_bytes(storages: Storages) -> int:
    return sum(num_bytes for _, num_bytes in storages.values())


def by_kind(storages: Storages, *, trains: bool) -> dict[str, int]:
    """Bytes of each kind."""
    sums = dict.fromkeys(MEMORY_KINDS, 0)
    for kind, num_bytes in storages.values():
        sums[kind if kind != STATE else "copies" if trains else "optimizer"] += num_bytes
    return sums


# ------------------------------------------------------------------------------------------------------- the papers' formulas


class MemoryFormula(NamedTuple):
    """An algorithm's memory in bytes per parameter."""

    text: str  # the terms, such as 2+2+2+12/4
    per_param: float  # their sum


def paper_formula(algorithm: Any, replica: LocalReplica, islands: int) -> MemoryFormula | None:
    """The formula of ACCO's paper (arXiv 2406.02613, Table 1) with this run's dtypes; None for an algorithm that the paper does not
    have. Its terms are weights, gradients, communication buffer, and the optimizer's share; where replicas train, two copies of the
    weights come last.

    The paper has weights of 2 bytes and an optimizer of 12: master weights and Adam's two moments, in single precision. Here
    weights have the module's dtype, and an optimizer has 4 bytes for master weights and 4 for each moment. A module in single
    precision that is trained needs no master weights.
    """
    if isinstance(replica.rule, TorchRule) or isinstance(getattr(algorithm, "optimizer", None), TorchRule):
        return None  # its moments differ from tensor to tensor
    width = replica.weights.layout.dtype.itemsize
    if isinstance(algorithm, DiLoCo):
        optimizer = 4 * _moments(replica.rule) + (4 if width < 4 else 0)
        unsent = 4 if algorithm.codec != "fp32" and algorithm.feedback else 0  # which the paper does not have
        text = f"{width}+{width}+{optimizer}+2*{width}" + (f"+{unsent}" if unsent else "")
        return MemoryFormula(text, 4 * width + optimizer + unsent)
    if not isinstance(algorithm, DDP | ZeRO1 | ACCO | DPU | WP):
        return None
    optimizer = 4 + 4 * _moments(algorithm.rule)
    if isinstance(algorithm, DDP):
        return MemoryFormula(f"{width}+{width}+{optimizer}", 2 * width + optimizer)
    gradients = width + 4 if algorithm.sums == "fp32" and width < 4 else width  # accumulated in a second buffer
    whole = [width, gradients]
    sent = {"own": width, "bf16": 2, "fp32": 4}[algorithm.wire]
    if sent != width or not isinstance(algorithm, ZeRO1):  # else ZeRO-1 sends the gradients from their own buffer
        whole.append(sent)
    return MemoryFormula("+".join(map(str, whole)) + f"+{optimizer}/{islands}", sum(whole) + optimizer / islands)


def _moments(rule: Any) -> int:
    """Moments per weight."""
    return sum(1 for _ in trees_in(rule.init(Tree.of({}))))
