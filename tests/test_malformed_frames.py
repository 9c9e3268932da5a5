"""Fuzzers of what other processes send: each input ends with an error, with an answer to what it asks, or as if it were not sent,
and the next valid request is answered."""

import json
import socket
import struct
import sys
import threading
import time
import zlib
from contextlib import closing, contextmanager, suppress

import pytest
import torch
from hypothesis import given, settings, strategies as st

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.engines.elastic import snapshot_server
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.gateway import Gateway
from atoll.engines.elastic.gateway_client import GatewayClient, GatewayNetwork
from atoll.engines.elastic.gateway_protocol import wire_version
from atoll.engines.elastic.quorum import Member
from atoll.engines.elastic.rendezvous import RegistryClient
from atoll.engines.elastic.run_identity import RunSecrets
from atoll.engines.elastic.snapshot_server import IslandStatus, Snapshot, SnapshotServer, fetch_snapshot, query_status
from atoll.engines.elastic.state_version import checksum
from atoll.engines.network_interfaces import is_loopback
from atoll.engines.point_to_point import PeerUnreachable
from atoll.engines.socket_transport import SocketGroup
from tests.fuzzing import FUZZED, FUZZERS

HOST, LIMIT_S, RUN = "127.0.0.1", 20.0, "run-0123456789abcdef"
TENSORS = {"w": torch.arange(4.0)}
STATUS = IslandStatus("island-0000", True, "192.0.2.7:4711", run=RUN)
STATUS.standby = f"{STATUS.address} {STATUS.address}"

# ---------------------------------------------------------------------------------------------------------------------- inputs

numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, -1, 1 << 31, 1 << 63, 1 << 64, 10**400, -(10**400), 1e308, 1e-320])
)
leaves = st.one_of(
    st.none(), st.booleans(), numbers, st.text(max_size=20), st.sampled_from(["", "\0", "../x", "\ud800", "x" * 5000])
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)


@st.composite
def damaged(draw, frames):
    """A valid frame with a few damages."""
    frame = bytearray(draw(st.sampled_from(frames)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(frame) - 1)))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "repeat", "replace"]))
        if kind == "flip" and frame:
            frame[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del frame[at:]
        elif kind == "insert":
            frame[at:at] = draw(st.binary(max_size=9))
        elif kind == "repeat":
            frame[at:at] = frame[at : at + draw(st.integers(0, 64))]
        else:
            frame[at : at + 8] = draw(st.binary(max_size=16))
    return bytes(frame)


def lines(record):
    """The line of a JSON object with some fields replaced, left out or added."""
    changes = st.dictionaries(st.one_of(st.sampled_from([*record]), st.text(max_size=8)), values, max_size=3)
    missing = st.sets(st.sampled_from([*record]), max_size=2)
    return st.builds(
        lambda more, less: json.dumps({k: v for k, v in (record | more).items() if k not in less}).encode() + b"\n",
        changes,
        missing,
    )


def frames(valid, *more):
    nested = st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"9" * 100_000, b"\n", b"GET / HTTP/1.1\r\n\r\n"])
    return st.one_of(
        damaged(valid), damaged(valid), *more, values.map(lambda one: json.dumps(one).encode() + b"\n"), nested, st.binary()
    )


# --------------------------------------------------------------------------------------------------------------------- targets


@pytest.fixture
def failures(monkeypatch):
    """What ended a thread, or a server's answer, other than as the code provides for."""
    found = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: found.append(arguments.exc_value))
    monkeypatch.setattr(snapshot_server._TcpServer, "handle_error", lambda self, request, client: found.append(sys.exc_info()[1]))
    return found


def until(condition):
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def sent(stream, frame):
    """What the other end answers to these bytes, behind which nothing comes."""
    answer = b""
    with suppress(OSError):
        stream.sendall(frame)
        socket.socket.shutdown(stream, socket.SHUT_WR)
    with suppress(OSError):
        while received := stream.recv(1 << 16):
            answer += received
    return answer


ASKED = {"run": RUN, "atoll": wire_version(), "name": "box-1", "to": "registry", "limit_s": 0.01}


@contextmanager
def gateway(tmp_path):
    """Frames inside of TLS, from a member, and in place of TLS, from a stranger."""
    RunSecrets.create(tmp_path)
    with socket.create_server((HOST, 0)) as service:
        threading.Thread(target=greet, args=(service,), daemon=True).start()
        ports = {"registry": service.getsockname()[1]}
        with closing(Gateway(lambda: RunSecrets.read(tmp_path), f"{HOST}:0", ports, lambda text: None)) as served:
            credentials = RunSecrets.invite(tmp_path, (served.address,)).credentials
            context, port = credentials.client_context(), int(served.address.rpartition(":")[2])

            def check(frame, stranger):
                with socket.create_connection((HOST, port), LIMIT_S) as connection:
                    if stranger:
                        sent(connection, frame)
                        return
                    with context.wrap_socket(connection, server_hostname=credentials.run_id) as stream:
                        answer = sent(stream, frame.replace(RUN.encode(), credentials.run_id.encode())).partition(b"\n")[0]
                    assert not answer or json.loads(answer).keys() & {"ok", "error"}

            yield check
            with GatewayClient(lambda: credentials, [served.address], "box-2").open("registry", LIMIT_S) as stream:
                assert stream.recv(5) == b"hello"


def greet(server):
    with suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(b"hello")


@contextmanager
def queries(tmp_path):
    network = DirectNetwork(HOST, run_id=RUN)
    with closing(SnapshotServer(HOST, STATUS.to_json, network=network)) as server:
        server.publish(Snapshot({"round": 3}, TENSORS))
        port = int(server.address.rpartition(":")[2])

        def check(frame):
            with socket.create_connection((HOST, port), LIMIT_S) as connection, suppress(OSError):
                connection.sendall(frame)

        yield check
        until(lambda: server._server._open == 0)
        assert query_status(STATUS.name, server.address, LIMIT_S, network) == STATUS
        assert torch.equal(fetch_snapshot(server.address, LIMIT_S, network, TENSORS).tensors["w"], TENSORS["w"])


def snapshot_frame(header, tensors, age_s=0.0):
    data = TENSORS["w"].numpy().tobytes()
    first = json.dumps({"header": header, "tensors": tensors, "age_s": age_s}).encode()
    return first + b"\n" + data + f"{checksum(data)}\n".encode()


@contextmanager
def answers(tmp_path):
    frame, listener = [b""], socket.create_server((HOST, 0))

    def serve():
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.recv(64)
                    connection.sendall(frame[0])

    threading.Thread(target=serve, daemon=True).start()
    address = f"{HOST}:{listener.getsockname()[1]}"

    def check(sends):
        frame[0] = sends
        with suppress(ExchangeFailed):
            found = fetch_snapshot(address, LIMIT_S, DirectNetwork(HOST), TENSORS, [torch.zeros(2)])
            assert found is None or (found.tensors["w"].shape == (4,) and found.nbytes < 1_000)

    yield check
    check(snapshot_frame({}, {"w": ["float32", [4]]}))
    assert torch.equal(fetch_snapshot(address, LIMIT_S, DirectNetwork(HOST), TENSORS).tensors["w"], TENSORS["w"])
    socket.socket.shutdown(listener, socket.SHUT_RDWR)
    listener.close()


def message(payload, number=0, magic=0x41544C4C):
    fields = struct.pack("<IIQ", magic, number, len(payload))
    return fields + struct.pack("<I", zlib.crc32(fields)) + payload


@contextmanager
def messages(tmp_path):
    right = message(bytes(range(12)))

    def check(frame):
        with socket.create_server((HOST, 0)) as server:
            peer = socket.create_connection(server.getsockname())
            own, _ = server.accept()
        group, into = SocketGroup(0, 2, {1: own}), torch.zeros(12, dtype=torch.uint8)
        wait = group.post({}, {1: into})
        with peer, suppress(OSError):
            peer.sendall(frame)
        if frame[: len(right) - 12] == right[:-12] and len(frame) >= len(right):
            wait(LIMIT_S)
            assert bytes(into.tolist()) == frame[len(right) - 12 : len(right)]
        else:
            with pytest.raises(PeerUnreachable):
                wait(LIMIT_S)
        group.abort()

    yield check
    check(right)


@contextmanager
def entries(tmp_path):
    """Statuses and ids of members, from which islands take addresses that they dial, and standbys that they may change to."""
    client = GatewayClient(lambda: None, [f"{HOST}:1"], "box-2")
    local = GatewayNetwork(client, RUN, registry=f"{HOST}:1", lighthouse=f"{HOST}:1", islands=1, refused=pytest.fail)
    direct, looked_up = DirectNetwork(HOST, run_id=RUN), socket.getaddrinfo

    def on_loopback(host, port, *options):  # the host is encoded, and no name server and no other machine is asked
        (found,) = looked_up(host, port, 0, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)
        if not is_loopback(found[-1][0]):
            raise socket.gaierror
        return [found]

    def check(text, address):
        text = text.replace(STATUS.address.encode(), json.dumps(address)[1:-1].encode())
        status, member = IslandStatus.from_text(text), Member.from_replica_id(text.decode("utf-8", "replace"))
        if status is not None:
            again = IslandStatus.from_text(json.dumps(status.to_json()).encode())
            assert again is not None
            assert again.to_json() == status.to_json(), "what is read can be passed on"
            with suppress(ConfigError):
                for place in direct.place(status.standby):
                    reach(lambda place=place: RegistryClient(place, 0.1).names())
        for network in (direct, local):
            for found in filter(None, (status, member)):
                reach(lambda found=found, network=network: network.dial(found.address, 0.02).close())

    def reach(dial):
        with suppress(OSError, ExchangeFailed):
            dial()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", on_loopback)
        yield check


STATUS_FRAME = json.dumps(STATUS.to_json()).encode()
ID_FRAME = Member(STATUS.name, STATUS.address, True, 1.0, 5, RUN, "island-0000#1").to_replica_id().encode()
hosts = st.one_of(
    st.sampled_from([HOST, "island", "island:island-0000", "island:x", "a" * 64, f"x.{'a' * 64}", "\udcff", "", "1,b"]),
    st.text(max_size=70),
)
ports = st.one_of(st.integers(), st.sampled_from(["9" * 5000, "\u00b2", "", "-1", "1_0", "1 "]), st.text(max_size=8))
addresses = st.one_of(st.just(f"{HOST}:1"), st.builds("{}:{}".format, hosts, ports), st.text(max_size=70))
lengths = st.sampled_from([0, 1, 2, 4, -1, 1 << 31, 1 << 40, 1 << 62, 1 << 63, 1 << 64])
kinds = st.tuples(st.sampled_from(["float32", "int8", "bool", "qint8", "bits8", "complex64"]), st.lists(lengths, max_size=4))
more_tensors = st.dictionaries(st.sampled_from(["moments.a", "moments.b", "w.x"]), kinds, min_size=1)
SNAPSHOT = {"header": {}, "tensors": {"w": ["float32", [4]]}, "age_s": 0.0}
QUERIES = [f"{query} {RUN}\n".encode() for query in ("snapshot", "status", "relay box-2 status", "exchange 0123abcd 1")]
TARGETS = {
    "gateway": (gateway, frames([json.dumps(ASKED).encode() + b"\n"], lines(ASKED)), st.booleans()),
    "queries to a snapshot server": (queries, frames([*QUERIES, b"exchange 0123abcd 1\n"])),
    "answers of a snapshot server": (
        answers,
        frames(
            [snapshot_frame({}, SNAPSHOT["tensors"])],
            lines(SNAPSHOT),
            st.builds(snapshot_frame, values, values, values),
            more_tensors.map(lambda more: snapshot_frame({}, SNAPSHOT["tensors"] | more)),
        ),
    ),
    "messages of a socket group": (
        messages,
        frames(
            [message(bytes(12)), message(bytes(12), 1), message(b"")], st.builds(message, st.binary(max_size=20), st.integers(0, 9))
        ),
    ),
    "entries of the registry and the lighthouse": (
        entries,
        st.one_of(st.just(STATUS_FRAME), st.just(ID_FRAME), frames([STATUS_FRAME, ID_FRAME], lines(STATUS.to_json()))),
        addresses,
    ),
}


@pytest.mark.parametrize("size", ["fast", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TARGETS)
def test_what_another_process_sends_ends_with_an_error_or_an_answer_and_the_next_request_is_answered(
    tmp_path, failures, name, size
):
    (target, *strategies), wanted, tried = TARGETS[name], getattr(FUZZERS[name], size), []
    with target(tmp_path) as check:

        @settings(max_examples=wanted, **FUZZED)
        @given(st.tuples(*strategies))
        def try_one(given):
            tried.append(given)
            check(*given)

        try_one()
    assert len(tried) >= wanted
    assert not failures, failures[0]
