"""What a commit adds to its exchange over gloo, over plain sockets and over TLS, for `elastic_cost.py`.

An exchange is a reduce-scatter and an all-gather of one fp32 buffer between two processes, as on `--engine processes`. A commit is
the exchange of an elastic round: announcements, checksums of all that is sent and received, the vote, and the digest of the new
weights and momentum. All six alternate on one machine; figures are medians, and ratios to gloo are taken turn by turn. One torch
thread each. Needs the command `openssl` for a certificate.
"""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from atoll.core.flat_tree import Tree
from atoll.engines.elastic.aggregation import IslandReport, Proposal, UpdateValidator, ValidatedMean
from atoll.engines.elastic.state_version import StateVersion, state_digest
from atoll.engines.group_collectives import GroupCollectives
from atoll.engines.point_to_point import Group
from atoll.engines.round_record import WallClock
from atoll.engines.socket_transport import SocketGroup
from progress import timed
from record import markdown_table

GLOO, PLAIN, TLS = TRANSPORTS = "gloo", "plain sockets", "TLS 1.3"
LOCALHOST, TIMEOUT_S = "127.0.0.1", 60.0


@dataclass(frozen=True)
class Plan:
    """A number of parameters, and of turns after a warm-up turn."""

    params: int
    turns: int


def connected(group: dist.ProcessGroup, certificate: str | None) -> SocketGroup:
    """The two processes of a group, connected over loopback; with a certificate, over TLS."""
    rank, port = dist.get_rank(group), torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        with socket.create_server((LOCALHOST, 0)) as server:
            port[0] = server.getsockname()[1]
            dist.broadcast(port, 0)
            connection, _ = server.accept()
    else:
        dist.broadcast(port, 0)
        connection = socket.create_connection((LOCALHOST, int(port)), TIMEOUT_S)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if rank == 0 else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if rank == 0:
            context.load_cert_chain(certificate)
        else:
            context.load_verify_locations(certificate)
        connection = context.wrap_socket(connection, server_side=rank == 0, server_hostname=None if rank == 0 else "localhost")
    return SocketGroup(rank, 2, {1 - rank: connection})


class Measured:
    """Both exchanges of one transport."""

    def __init__(self, group: Group, plan: Plan) -> None:
        self._collectives = GroupCollectives(group, timeout_s=TIMEOUT_S)
        generator = torch.Generator().manual_seed(group.rank())
        self._delta = Tree.of({"weights": torch.randn(plan.params, generator=generator)})
        self._state = {"params": Tree.of({"weights": torch.zeros(plan.params)}), "velocity": self._delta.copy()}
        self._mean = ValidatedMean(UpdateValidator(25.0), WallClock())
        self._digest = 0

    def exchange(self) -> None:
        mean = self._delta.copy()
        self._collectives.reduce_scatter(mean.flat, [1.0, 1.0], divide_by=2.0)
        self._collectives.all_gather(mean.flat)
        mean.release()

    def commit(self) -> None:
        states = self._collectives.all_gather_numbers(0, 0, 1, self._digest)
        report = IslandReport(folder="run", address="")
        working = frozenset(self._collectives.names)
        agreed = self._mean(
            self._collectives, states, Proposal(StateVersion(0, 0), self._digest, report, self._delta, 1.0, working)
        )
        empty = dict.fromkeys(("leases", "validator", "known", "present"), 0)
        self._digest = state_digest(self._state, empty)
        agreed.value.release()


def measured(group: dist.ProcessGroup, plan: Plan, certificate: str) -> dict[str, dict[str, list[float]]]:
    """Seconds of each turn, in one of the processes."""
    plain, tls = connected(group, None), connected(group, certificate)
    groups: dict[str, Group] = {GLOO: group, PLAIN: plain, TLS: tls}
    steps: dict[tuple[str, str], Callable[[], None]] = {}
    for name, one in groups.items():
        both = Measured(one, plan)
        steps |= {("exchange", name): both.exchange, ("commit", name): both.commit}
    found: dict[str, dict[str, list[float]]] = {what: {name: [] for name in TRANSPORTS} for what in ("exchange", "commit")}
    for turn in range(1 + plan.turns):
        for (what, name), step in steps.items():
            dist.barrier()
            taken_s, _ = timed(step)
            if turn:
                found[what][name].append(taken_s)
    dist.barrier()
    plain.abort()
    tls.abort()
    return found


def transport_costs(plan: Plan) -> dict[str, Any]:
    """Both exchanges over each transport, as both processes measured them."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of `tests`
    from tests.process_pool import ProcessPool

    with closing(ProcessPool(2)) as both, tempfile.TemporaryDirectory() as folder:
        return {"params": plan.params, "ranks": both.run(measured, plan, make_certificate(folder))}


def make_certificate(folder: str) -> str:
    """A file with a key and its self-signed certificate for localhost."""
    path = f"{folder}/certificate.pem"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path]
    made = subprocess.run(["openssl", "req", "-x509", *key, *name], check=True, capture_output=True)
    with Path(path).open("ab") as file:
        file.write(made.stdout)
    return path


# -------------------------------------------------------------------------------------------------------------- the report


def transport_section(cell: Mapping[str, Any]) -> str:
    """What the checks of a commit add to its exchange, and what TLS adds to both."""
    exchange, commit = ({name: slower(cell["ranks"], what, name) for name in TRANSPORTS} for what in ("exchange", "commit"))
    rows = [
        [
            name,
            f"{median(exchange[name]):.3f}",
            f"{ratio(exchange[name], exchange[GLOO]):.2f}",
            f"{median(commit[name]):.3f}",
            f"{ratio(commit[name], commit[GLOO]):.2f}",
            f"{median_difference(commit[name], exchange[name]):.3f}",
        ]
        for name in TRANSPORTS
    ]
    headings = ["transport", "exchange, s", "to gloo", "commit, s", "to gloo", "commit beyond exchange, s"]
    words = (
        f"The exchange alone, without an engine: {cell['params']:,} fp32 parameters between two processes over loopback, "
        f"{len(exchange[GLOO])} turns. TLS adds {median_difference(exchange[TLS], exchange[PLAIN]):.3f} s to an exchange over "
        f"plain sockets, and {median_difference(commit[TLS], commit[PLAIN]):.3f} s to a commit."
    )
    return f"{words}\n\n{markdown_table(headings, rows)}"


def slower(ranks: Sequence[Mapping[str, Any]], what: str, name: str) -> list[float]:
    """The seconds of the slower process, turn by turn."""
    return [max(turn) for turn in zip(*(rank[what][name] for rank in ranks), strict=True)]


def median_difference(seconds: Sequence[float], base: Sequence[float]) -> float:
    return median(one - other for one, other in zip(seconds, base, strict=True))


def ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    return median(one / other for one, other in zip(seconds, base, strict=True))
