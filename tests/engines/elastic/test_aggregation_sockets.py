"""A commit over sockets has the bits of a commit over gloo: with islands without work, rejected deltas, and unequal slices."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from atoll.core.flat_tree import Tree
from atoll.core.protocols import Encoding
from atoll.engines.chunk_reduction import encoded_mean
from atoll.engines.elastic.aggregation import IslandReport, Proposal, UpdateValidator, ValidatedMean
from atoll.engines.elastic.state_version import StateVersion
from atoll.engines.group_collectives import GroupCollectives
from atoll.engines.round_record import WallClock
from atoll.engines.socket_transport import SocketGroup
from atoll.optim.codecs import CODECS

HOST, NUMEL = "127.0.0.1", 100_003


def gloo_groups(size):
    store = HashStore()

    def group(rank):
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=30)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
        return dist.ProcessGroupGloo(store, rank, size, options)

    with ThreadPoolExecutor(size) as pool:
        return [*pool.map(group, range(size))]


def socket_groups(size):
    ends = [{} for _ in range(size)]
    for one in range(size):
        for other in range(one):
            with socket.create_server((HOST, 0)) as server:
                ends[one][other] = socket.create_connection(server.getsockname())
                ends[other][one], _ = server.accept()
    return [SocketGroup(rank, size, ends[rank]) for rank in range(size)]


def encoding_by(codec, rank):
    return None if codec == "fp32" else Encoding(CODECS[codec], rank)


def committed(groups, deltas, weights, codec="fp32"):
    """What each island agreed to."""

    def one(group):
        rank = group.rank()
        collectives = GroupCollectives(group, timeout_s=30.0, chunk_bytes=40_000)
        report, working = IslandReport("run", ""), frozenset(collectives.names)
        tree, encoding = Tree.of({"w": deltas[rank].clone()}), encoding_by(codec, rank)
        proposal = Proposal(StateVersion(1, 1), 1, report, tree, weights[rank], working, compare=True, encoding=encoding)
        states = [[1.0]] * len(groups)
        return ValidatedMean(UpdateValidator(5.0), WallClock())(collectives, states, proposal)

    with ThreadPoolExecutor(len(groups)) as pool:
        return [*pool.map(one, groups)]


@pytest.mark.parametrize(
    ("weights", "scales", "rejected"),
    [
        ((64.0, 128.0), (1.0, 1.0), ()),
        ((0.0, 128.0), (1.0, 1.0), ()),
        ((0.0, 0.0), (1.0, 1.0), ()),
        ((64.0, 1.0, 3.0), (1.0, 1.0, 100.0), (2,)),
        ((64.0, 1.0, 3.0), (1.0, float("nan"), 1.0), (1,)),
        ((0.0, 1.0, 3.0), (float("nan"), 1.0, 1.0), ()),
        ((1.0, 2.0, 0.0, 5.0), (1.0, 1.0, 1.0, 1e9), (3,)),
        ((1.0, 2.0, 3.0, 5.0), (1.0, float("inf"), 1.0, 1.0), (1,)),
    ],
)
def test_a_commit_over_sockets_has_the_bits_of_gloo(weights, scales, rejected):
    size = len(weights)
    deltas = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) * scales[rank] for rank in range(size)]
    sockets = socket_groups(size)
    ours, gloo = committed(sockets, deltas, weights), committed(gloo_groups(size), deltas, weights)
    for group in sockets:
        group.abort()
    used = [rank for rank in range(size) if weights[rank] and rank not in rejected]
    want = torch.zeros(NUMEL)
    for rank in used:
        want += deltas[rank] * weights[rank]
    want = want / sum(weights[rank] for rank in used) if used else want
    for one in (*ours, *gloo):
        assert torch.equal(one.value.flat, want)
        assert tuple(one.rejected) == rejected
        assert one.deltas == ours[0].deltas


@pytest.mark.parametrize("codec", ["bf16-stochastic", "int4", "topk"])
def test_an_encoded_commit_over_sockets_has_the_bits_of_gloo_and_of_the_simulator(codec):
    weights = (64.0, 0.0, 3.0)
    deltas = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    sockets = socket_groups(3)
    ours, gloo = committed(sockets, deltas, weights, codec), committed(gloo_groups(3), deltas, weights, codec)
    for group in sockets:
        group.abort()
    trees, encodings = [Tree.of({"w": delta}) for delta in deltas], [encoding_by(codec, rank) for rank in range(3)]
    mean, owed = encoded_mean(trees, weights, encodings)
    for one in (*ours, *gloo):
        assert one.value.same_bits(mean)
        assert one.unsent is None if not weights[one.rank] else one.unsent.same_bits(owed[one.rank])
        assert one.reports[0].record.exchanges[0].sent_bytes == ours[0].reports[0].record.exchanges[0].sent_bytes
