"""The snapshot server, over real sockets on this machine."""

import json
import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import pytest
import torch
from torch import nn

from atoll.algorithms.diloco import DiLoCo
from atoll.core.errors import ExchangeFailed
from atoll.core.flat_tree import Tree
from atoll.core.serialization import pack
from atoll.engines.elastic import snapshot_server
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.snapshot_server import IslandPhase, IslandStatus, Snapshot, SnapshotServer, fetch_snapshot, query_status
from atoll.engines.elastic.state_version import StateVersion
from atoll.engines.shared_and_sharded_state import shared_fields
from atoll.optim.torch_optimizers import TorchOptimizer

HOST, LIMIT_S = "127.0.0.1", 20.0
STATUS = IslandStatus("a", True, phase=IslandPhase.JOINED, version=StateVersion(3, 7), suspects=frozenset("b"))
TENSORS = {
    "weights": torch.randn(300_001),
    "half": torch.randn(7).bfloat16(),
    "steps": torch.tensor(5),
    "nothing": torch.zeros(0),
}


@pytest.fixture
def server():
    server = SnapshotServer(HOST, STATUS.to_json)
    yield server
    server.close()


def test_a_client_receives_every_bit(server):
    server.publish(Snapshot({"round": 3, "names": ["a"]}, TENSORS))
    got = fetch_snapshot(server.address, LIMIT_S)
    assert got.header == {"round": 3, "names": ["a"]}
    assert got.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())
    for name, tensor in TENSORS.items():
        assert got.tensors[name].dtype == tensor.dtype
        assert torch.equal(got.tensors[name], tensor), name


def test_a_client_waits_for_the_snapshot_after_one_that_is_withdrawn(server):
    server.publish(Snapshot({"round": 3}, TENSORS))
    assert server.withdraw()
    with ThreadPoolExecutor(1) as pool, socket.create_connection((HOST, server.port)) as waiting:
        waiting.sendall(b"snapshot\n")
        fetched = pool.submit(fetch_snapshot, server.address, LIMIT_S)
        assert not select.select([waiting], [], [], 0.1)[0]
        assert server.withdraw(), "a client that waits reads nothing"
        server.publish(Snapshot({"round": 4}, TENSORS))
        assert fetched.result().header == {"round": 4}
        assert waiting.recv(1)


def test_a_snapshot_that_is_being_read_is_not_withdrawn(server):
    server.publish(Snapshot({}, {"large": torch.zeros(1 << 24)}))
    with socket.create_connection((HOST, server.port)) as reader:
        reader.sendall(b"snapshot\n")
        assert reader.recv(1)
        assert not server.withdraw()
        assert server.has_readers


def test_a_server_without_a_snapshot_sends_none(server):
    assert fetch_snapshot(server.address, LIMIT_S) is None


def test_an_island_answers_status_queries_until_it_is_closed(server):
    assert query_status("a", server.address, LIMIT_S) == STATUS
    closed = SnapshotServer(HOST)
    closed.close()
    assert query_status("a", closed.address, 0.5) is None
    with pytest.raises(ExchangeFailed, match=f"could be fetched from {closed.address}"):
        fetch_snapshot(closed.address, 0.5)


def test_a_process_that_listens_and_does_not_answer_is_not_alive():
    with socket.create_server((HOST, 0)) as silent:
        assert query_status("a", f"{HOST}:{silent.getsockname()[1]}", 0.05) is None


def test_a_reader_is_known_until_it_has_read_the_snapshot_it_began_with(server):
    server.publish(Snapshot({"round": 1}, {"weights": torch.ones(20_000_000)}))  # more than any socket holds
    with socket.create_connection(server.address.rsplit(":", 1)) as slow:
        slow.sendall(b"snapshot\n")
        slow.recv(1)
        assert server.has_readers
        server.publish(Snapshot({"round": 2}, {"weights": torch.zeros(1)}))
        assert fetch_snapshot(server.address, LIMIT_S).header == {"round": 2}
        assert server.has_readers
    for thread in [t for t in threading.enumerate() if "process_request" in t.name]:
        thread.join(LIMIT_S)
    assert not server.has_readers


def answering(answer):
    """A server that gives this answer once, and its address."""
    server = socket.create_server((HOST, 0))

    def serve():
        with server, server.accept()[0] as connection:
            connection.recv(64)
            connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return f"{HOST}:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"", "it ended in its first line"),
        (b'{"header": {}, "tensors": {"w": ["float32", [4]]}}\n12345678', "it ended in the middle"),
        (b'{"header": {}, "tensors": {"w": ["float32", [1]]}}\n12345\n', "its checksum does not match"),
        (b"hello\n", "Expecting value"),
        (b"[1]\n", "no JSON object"),
    ],
)
def test_a_damaged_or_truncated_snapshot_is_refused(answer, says):
    with pytest.raises(ExchangeFailed, match=says):
        fetch_snapshot(answering(answer), LIMIT_S)


def test_a_client_that_stops_reading_is_dropped():
    free, server = threading.Event(), SnapshotServer(HOST, limit_s=0.1)
    server.publish(Snapshot({}, {"weights": torch.zeros(8_000_000)}))  # more than links and buffers hold
    send = server._send

    def sending(write):
        try:
            send(write)
        finally:
            free.set()

    server._send = sending
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as frozen:
        frozen.sendall(b"snapshot\n")
        assert free.wait(10.0)
        assert not server.has_readers
    server.close()


def test_queries_of_another_run_get_no_answer_and_answers_of_one_are_none(server):
    ours, theirs = DirectNetwork(HOST, run_id="run-1"), DirectNetwork(HOST, run_id="run-2")
    status = replace(STATUS, run="run-1")
    with closing(SnapshotServer(HOST, status.to_json, network=ours)) as of_a_run:
        of_a_run.publish(Snapshot({"round": 3}, TENSORS))
        assert query_status("a", of_a_run.address, LIMIT_S, ours) == status
        assert fetch_snapshot(of_a_run.address, LIMIT_S, ours).header == {"round": 3}
        assert query_status("a", of_a_run.address, LIMIT_S, theirs) is None
        with pytest.raises(ExchangeFailed, match="it ended in its first line"):
            fetch_snapshot(of_a_run.address, LIMIT_S, theirs)
        assert query_status("a", server.address, LIMIT_S, ours) is None


@pytest.mark.parametrize("line", ["exchange 0123abcd 1", "relay b exchange 0123abcd 1", "relay b status"])
@pytest.mark.parametrize("mark", ["", " run-2"])
def test_exchanges_and_relayed_queries_of_another_run_are_closed(line, mark):
    ours = DirectNetwork(HOST, run_id="run-1")
    with closing(SnapshotServer(HOST, network=ours)) as one, socket.create_server((HOST, 0)) as member:
        member.settimeout(0.1)
        one.routes = {"b": f"{HOST}:{member.getsockname()[1]}"}
        with ours.dial(one.address, LIMIT_S) as client:
            client.sendall(f"{line}{mark}\n".encode())
            assert client.recv(1) == b""
        assert not one.accepted.has("0123abcd")
        with pytest.raises(TimeoutError):
            member.accept()


def drips(connection):
    """Sends a byte every 50 ms. Returns when the other end closes the connection, and whether that was before the 100th byte."""
    with suppress(OSError):
        for _ in range(100):
            connection.sendall(b"x")
            if select.select([connection], [], [], 0.05)[0]:
                return True
        return False
    return True


def test_an_island_that_answers_a_byte_at_a_time_does_not_answer():
    with socket.create_server((HOST, 0)) as slow, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(query_status, "a", f"{HOST}:{slow.getsockname()[1]}", 0.3)
        with slow.accept()[0] as connection:
            connection.recv(64)
            assert drips(connection)
        assert asked.result() is None


def test_a_donor_that_sends_its_snapshot_a_byte_at_a_time_is_given_up_and_a_slow_one_is_not(monkeypatch):
    with socket.create_server((HOST, 0)) as slow, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(fetch_snapshot, f"{HOST}:{slow.getsockname()[1]}", 0.3)
        with slow.accept()[0] as connection:
            connection.recv(64)
            assert drips(connection)
        with pytest.raises(ExchangeFailed, match=r"less than 10000 bytes a second|timed out"):
            asked.result()
        monkeypatch.setattr(snapshot_server, "_LEAST_RATE", 10)  # the drips are twice as fast
        asked = pool.submit(fetch_snapshot, f"{HOST}:{slow.getsockname()[1]}", 0.5)
        with slow.accept()[0] as connection:
            connection.recv(64)
            for _ in range(20):
                connection.sendall(b"x")
                assert not select.select([connection], [], [], 0.05)[0]
            connection.sendall(b"\n")
        with pytest.raises(ExchangeFailed, match="Expecting value"):
            asked.result()


def test_a_client_that_sends_its_query_a_byte_at_a_time_is_dropped(server, monkeypatch):
    monkeypatch.setattr(snapshot_server, "_FIRST_LINE_S", 0.3)
    with socket.create_connection(server.address.rsplit(":", 1), timeout=LIMIT_S) as connection:
        assert drips(connection)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"w": ["float32", [1 << 50]]}, r"'w' is float32 of shape \(1125899906842624,\), and this run has float32 of shape \(4,\)"),
        ({"w": ["float64", [4]]}, "is float64 of shape"),
        ({"w": ["float32", [2, 2]]}, "and this run has float32 of shape"),
        ({"w": ["float32", [4]], "x": ["float32", [4]]}, "no tensor of this run is called 'x'"),
        ({"w": ["float32", [4]], "moments.x": ["float32", [4]]}, "no tensor of this run is called 'moments.x'"),
        (
            {"w": ["float32", [4]], "outer.x": ["int8", [1 << 50]]},
            "its tensors have 1125899906842640 bytes, and this run needs 64 at most",
        ),
        (
            {"w": ["float32", [4]], **{f"outer.{i}": ["float32", [4]] for i in range(4)}},
            "its tensors have 80 bytes, and this run needs 64",
        ),
        ({}, "it lacks w"),
        (
            {"w": ["float32", [4]], "outer.x": ["float32", [1 << 40, 1 << 40, 0]]},
            "its tensors have 4835703278458516698824720 bytes",
        ),
        ({"w": ["float32", [4]], "outer.x": ["quint4x2", [4]]}, "'quint4x2' is no dtype of a state"),
        ({"w": ["float32", [-4]]}, "'-4' is no length"),
        ({"w": ["float32", [True]]}, "'True' is no length"),
        ({"w": ["Tensor", [4]]}, "'Tensor' is no dtype"),
        ({"w": ["float32", 4]}, "not iterable"),
        ({"w": [["float32"], [4]]}, "is no dtype"),
        ({"w": ["float32", [4]], **{f"outer.{i}": ["float32", [0]] for i in range(99)}}, "it has 100 tensors"),
        ([], "could be fetched"),
    ],
)
def test_no_memory_is_taken_for_tensors_that_the_run_does_not_have(tensors, says):
    answer = json.dumps({"header": {}, "tensors": tensors, "age_s": 0.0}).encode() + b"\n"
    with pytest.raises(ExchangeFailed, match=says):
        fetch_snapshot(answering(answer), LIMIT_S, DirectNetwork(HOST), {"w": torch.zeros(4), "outer": ()})


@pytest.mark.parametrize("name", ["Adadelta", "AdamW", "NAdam", "SGD"])
def test_a_state_that_an_outer_rule_of_torch_has_extended_is_received_with_inner_moments(server, name):
    algorithm, params = (
        DiLoCo(inner_steps=1, outer=TorchOptimizer(name=name, lr=0.1)),
        Tree.of({"w": torch.ones(3, 2), "b": torch.ones(3)}),
    )
    before = shared_fields(algorithm.init(params, None))
    after, outer = algorithm.outer.update(params, params, before["outer"])
    weights = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))]
    inner = torch.optim.AdamW(weights, amsgrad=True)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    inner.step()
    tensors = pack({"params": after, "outer": outer, "moments": [*map(dict, inner.state.values())]}).tensors
    server.publish(Snapshot({}, tensors))
    assert fetch_snapshot(server.address, LIMIT_S, DirectNetwork(""), before, weights).tensors.keys() == tensors.keys()


def test_idle_connections_make_few_threads_and_hinder_no_query(server):
    before = threading.active_count()
    with ExitStack() as stack:
        for _ in range(600):
            stack.enter_context(socket.create_connection(server.address.rsplit(":", 1), timeout=LIMIT_S))
            assert threading.active_count() - before <= snapshot_server.MAX_WITHOUT_QUERY + 50  # closed ones end in a moment
        assert query_status("a", server.address, LIMIT_S) == STATUS


def test_a_connection_that_gets_no_thread_is_closed_and_the_next_one_is_served(server, monkeypatch):
    def no_thread(*_, **__):
        raise RuntimeError("can't start new thread")

    client, adopted = socket.socketpair()
    with monkeypatch.context() as patch, client:
        patch.setattr(threading, "Thread", no_thread)
        server.adopt(adopted)
        assert client.recv(1) == b""
    assert (server._server._open, [*server._server._without_query]) == (0, [])
    assert query_status("a", server.address, LIMIT_S) == STATUS


def test_a_connection_beyond_the_limit_is_closed(server, monkeypatch):
    monkeypatch.setattr(snapshot_server, "MAX_CONNECTIONS", 1)
    server.publish(Snapshot({}, {"weights": torch.ones(20_000_000)}))  # more than any socket holds
    with socket.create_connection(server.address.rsplit(":", 1), timeout=LIMIT_S) as reader:
        reader.sendall(b"snapshot\n")
        assert reader.recv(1)
        assert query_status("a", server.address, LIMIT_S) is None
