"""Where newcomers fetch the state: real sockets on this machine."""

import socket
import threading

import pytest
import torch

from atoll.core.errors import ExchangeFailed
from atoll.engines.elastic.snapshot_server import Cargo, Pier, ask, fetch

HOST = "127.0.0.1"
TENSORS = {
    "weights": torch.randn(300_001),
    "half": torch.randn(7).bfloat16(),
    "steps": torch.tensor(5),
    "nothing": torch.zeros(0),
}


@pytest.fixture
def pier():
    pier = Pier(HOST, about=lambda: {"name": "a", "generation": 3})
    yield pier
    pier.close()


def put(pier, cargo):
    with pier.changing() as change:
        change(cargo)


def test_whoever_asks_is_given_every_bit(pier):
    put(pier, Cargo({"round": 3, "names": ["a"]}, TENSORS))
    got = fetch(pier.address, 5.0)
    assert got.header == {"round": 3, "names": ["a"]}
    assert got.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())
    for name, tensor in TENSORS.items():
        assert got.tensors[name].dtype == tensor.dtype
        assert torch.equal(got.tensors[name], tensor), name


def test_a_pier_without_a_state_says_so(pier):
    assert fetch(pier.address, 5.0) is None


def test_an_island_says_that_it_is_alive_and_a_closed_one_does_not(pier):
    assert ask(pier.address, 5.0) == {"name": "a", "generation": 3}
    closed = Pier(HOST)
    closed.close()
    assert ask(closed.address, 0.5) is None
    with pytest.raises(ExchangeFailed, match=f"could not be fetched from {closed.address}"):
        fetch(closed.address, 0.5)


def test_somebody_who_listens_and_does_not_answer_is_not_alive():
    with socket.create_server((HOST, 0)) as silent:
        assert ask(f"{HOST}:{silent.getsockname()[1]}", 0.05) is None


def test_who_reads_is_known_until_it_is_through_and_reads_what_there_was(pier):
    put(pier, Cargo({"round": 1}, {"weights": torch.ones(20_000_000)}))  # more than any socket holds
    with socket.create_connection(pier.address.rsplit(":", 1)) as slow:
        slow.sendall(b"state\n")
        slow.recv(1)
        assert pier.busy
        put(pier, Cargo({"round": 2}, {"weights": torch.zeros(1)}))
        assert fetch(pier.address, 5.0).header == {"round": 2}
        assert pier.busy
    for thread in [t for t in threading.enumerate() if "process_request" in t.name]:
        thread.join(5.0)
    assert not pier.busy


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
        (b'{"header": {}, "tensors": {"w": ["float32", [1]]}}\n12345\n', "its checksum is another"),
        (b"hello\n", "Expecting value"),
    ],
)
def test_what_is_damaged_or_cut_short_is_refused(answer, says):
    with pytest.raises(ExchangeFailed, match=says):
        fetch(answering(answer), 5.0)


def test_whoever_asks_and_does_not_read_is_not_waited_for_without_end():
    free, pier = threading.Event(), Pier(HOST, limit_s=0.1)
    put(pier, Cargo({}, {"weights": torch.zeros(8_000_000)}))  # more than lines and buffers hold
    hand_out = pier._hand_out

    def handing_out(write):
        try:
            hand_out(write)
        finally:
            free.set()

    pier._hand_out = handing_out
    host, _, port = pier.address.rpartition(":")
    with socket.create_connection((host, int(port))) as frozen:
        frozen.sendall(b"state\n")
        assert free.wait(10.0)
        assert not pier.busy
    pier.close()
