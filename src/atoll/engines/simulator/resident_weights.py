"""Weights that replicas keep from one round to the next, because nobody's State has the whole of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.core.protocols import HoldsWeights
from atoll.replica.flat_parameters import FlatModule
from atoll.replica.local_replica import LocalReplica


class Member(Protocol):
    """An island among islands, or a device among those of one island."""

    state: Any
    replica: LocalReplica


def held(algorithm: HoldsWeights, members: Iterable[Member]) -> Tree:
    """What replicas hold between two rounds. Members are in rank order."""
    return Tree.join([algorithm.held(member.state) for member in members])


def load_held(algorithm: Any, members: Iterable[Member]) -> None:
    """Have all replicas hold it, if the algorithm is of this kind."""
    if isinstance(algorithm, HoldsWeights):
        members = list(members)
        whole = held(algorithm, members)
        for member in members:
            member.replica.load(whole)


def check_held(algorithm: Any, members: Mapping[str, Member], round: int) -> None:
    """Replicas must hold the weights that their slices make up. Members are by name, in rank order."""
    if not isinstance(algorithm, HoldsWeights):
        return
    whole = held(algorithm, members.values())
    for name, differs in zip(members, _who_differs(whole, [member.replica for member in members.values()]), strict=True):
        if differs:
            raise ExchangeFailed(
                f"{name} holds other weights than all slices make up, after round {round}. An algorithm that has `held` must "
                f"load what it gathered into the replica before a round ends."
            )


def _who_differs(whole: Tree, replicas: Sequence[LocalReplica]) -> list[bool]:
    """Which replicas hold other weights than these. A GPU is asked once for all of them."""
    flat = all(isinstance(replica.weights, FlatModule) for replica in replicas)  # others would lend a copy
    lent = [replica.weights.lent() for replica in replicas if flat and whole.flat.device.type != "cpu"]
    if not lent or any(weights.layout != whole.layout for weights in lent):
        return [not replica.weights.holds(whole) for replica in replicas]
    found: list[bool] = torch.stack([(one.flat != whole.flat.to(one.flat.dtype)).any() for one in lent]).tolist()
    return found
