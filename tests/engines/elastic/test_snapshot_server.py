"""The snapshot server, over real sockets on this machine."""

import socket
import threading

import pytest
import torch

from atoll.core.errors import ExchangeFailed
from atoll.engines.elastic.snapshot_server import IslandPhase, IslandStatus, Snapshot, SnapshotServer, fetch_snapshot, query_status
from atoll.engines.elastic.state_version import StateVersion

HOST = "127.0.0.1"
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
    got = fetch_snapshot(server.address, 5.0)
    assert got.header == {"round": 3, "names": ["a"]}
    assert got.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())
    for name, tensor in TENSORS.items():
        assert got.tensors[name].dtype == tensor.dtype
        assert torch.equal(got.tensors[name], tensor), name


def test_a_server_without_a_snapshot_sends_none(server):
    assert fetch_snapshot(server.address, 5.0) is None


def test_an_island_answers_status_queries_until_it_is_closed(server):
    assert query_status("a", server.address, 5.0) == STATUS
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
        assert fetch_snapshot(server.address, 5.0).header == {"round": 2}
        assert server.has_readers
    for thread in [t for t in threading.enumerate() if "process_request" in t.name]:
        thread.join(5.0)
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
        fetch_snapshot(answering(answer), 5.0)


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
