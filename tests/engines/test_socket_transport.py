"""Messages over plain and TLS sockets: whole, in order, both ways at once, and never more than the receiver has room for."""

import random
import socket
import ssl
import struct
import subprocess
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch

from atoll.core.errors import ExchangeFailed
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.snapshot_server import SnapshotServer
from atoll.engines.group_collectives import MAX_TEXT_BYTES, GroupCollectives
from atoll.engines.point_to_point import PeerUnreachable, transport_for
from atoll.engines.socket_transport import AcceptedConnections, SocketGroup, connect_group

HOST = "127.0.0.1"
KINDS = ["plain", "tls"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A file with a key and its self-signed certificate."""
    path = tmp_path_factory.mktemp("certificate") / "one.pem"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path]
    made = subprocess.run(["openssl", "req", "-x509", *key, *name], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + made.stdout)
    return path


@pytest.fixture
def connected(certificate):
    """Makes groups of this size whose members are connected by plain or by TLS sockets."""
    made = []

    def make(size, kind="plain"):
        ends = [{} for _ in range(size)]
        for one in range(size):
            for other in range(one):
                ends[one][other], ends[other][one] = socket_pair(certificate if kind == "tls" else None)
        made.extend(SocketGroup(rank, size, ends[rank]) for rank in range(size))
        return made[-size:]

    yield make
    for group in made:
        group.abort()


def socket_pair(certificate=None):
    with socket.create_server((HOST, 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    if certificate is None:
        return client, accepted
    context, client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(certificate)
    client_context.load_verify_locations(certificate)
    client_context.minimum_version = ssl.TLSVersion.TLSv1_3
    with ThreadPoolExecutor(1) as pool:
        wrapped = pool.submit(context.wrap_socket, accepted, server_side=True)
        return client_context.wrap_socket(client, server_hostname="localhost"), wrapped.result()


def in_parallel(function, groups):
    with ThreadPoolExecutor(len(groups)) as pool:
        return [one.result() for one in [pool.submit(function, group) for group in groups]]


@pytest.mark.parametrize("kind", KINDS)
def test_both_directions_saturated_with_messages_of_random_sizes(connected, kind):
    """64 MiB each way. Both ranks post all of their messages before they wait, and wait in an order of their own."""
    dice = random.Random(7)
    sizes = [
        [dice.choice([0, 1, 3, 4096, 4097, dice.randrange(1 << 16), dice.randrange(1 << 21)]) for _ in range(90)] for _ in "ab"
    ]
    for row in sizes:
        row.append(max(0, (64 << 20) - sum(row)))
    sent = [[torch.randint(0, 256, (size,), dtype=torch.uint8) for size in row] for row in sizes]

    def exchange(group):
        rank = group.rank()
        received = [torch.zeros(size, dtype=torch.uint8) for size in sizes[1 - rank]]
        waits = [group.post({}, {1 - rank: into}) for into in received]
        waits += [group.post({1 - rank: message}, {}) for message in sent[rank]]
        random.Random(rank).shuffle(waits)
        for wait in waits:
            wait(60.0)
        return all(torch.equal(one, other) for one, other in zip(received, sent[1 - rank], strict=True))

    assert in_parallel(exchange, connected(2, kind)) == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_many_posts_arrive_in_order_among_four(connected, kind):
    def rows(rank, to, turn):
        return torch.arange(5 + to, dtype=torch.float32) + 100 * rank + 1000 * to + turn

    def all_to_all(group):
        rank, waits, turned = group.rank(), [], []
        others = [other for other in range(4) if other != rank]
        for turn in range(20):
            received = {other: torch.empty(5 + rank) for other in others}
            waits.append(group.post({to: rows(rank, to, turn) for to in others}, received))
            turned.append(received)
        for wait in waits:
            wait(30.0)
        return all(
            torch.equal(row, rows(other, rank, turn)) for turn, received in enumerate(turned) for other, row in received.items()
        )

    assert in_parallel(all_to_all, connected(4, kind)) == [True] * 4


def test_a_socket_group_is_its_own_transport_and_sums_in_rank_order(connected):
    groups = connected(3)
    assert transport_for(groups[0]) is groups[0]
    terms = [torch.randn(100_003, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    want = ((terms[0] + 0.5 * terms[1]) + 2.0 * terms[2]) / 3.5

    def mean(group):
        flat = terms[group.rank()].clone()
        collectives = GroupCollectives(group, timeout_s=30.0, chunk_bytes=10_000)
        collectives.reduce_scatter(flat, [1.0, 0.5, 2.0], divide_by=3.5)
        collectives.all_gather(flat)
        return torch.equal(flat, want), collectives.all_gather_text("é" * (group.rank() + 1))

    assert in_parallel(mean, groups) == [(True, ["é", "éé", "ééé"])] * 3


@pytest.mark.parametrize("length", [-1.0, 0.0, 0.5, float("nan"), float("inf"), MAX_TEXT_BYTES + 1.0, 1e12])
def test_an_impossible_length_of_a_text_fails_the_exchange_on_all_ranks_before_memory_is_taken(connected, length):
    def gather(group):
        collectives = GroupCollectives(group, timeout_s=30.0)
        if group.rank() == 1:
            return collectives.all_gather_numbers(length)
        with pytest.raises(ExchangeFailed, match=rf"rank 1 announced a text of .* bytes, and 1 to {MAX_TEXT_BYTES} are allowed"):
            collectives.all_gather_text("text")
        return None

    in_parallel(gather, connected(3))


def test_a_text_that_is_too_long_fails_the_exchange_on_its_own_rank_too(connected, monkeypatch):
    monkeypatch.setattr("atoll.engines.group_collectives.MAX_TEXT_BYTES", 3)

    def gather(group):
        with pytest.raises(ExchangeFailed, match="rank 1 announced a text of 4 bytes, and 1 to 3 are allowed"):
            GroupCollectives(group, timeout_s=30.0).all_gather_text("text" if group.rank() else "")

    in_parallel(gather, connected(2))


def test_a_rank_that_sends_nothing_is_unreachable_after_the_timeout(connected):
    group, _ = connected(2)
    began_s = time.monotonic()
    with pytest.raises(PeerUnreachable, match=r"timed out after 0\.2 s") as lost:
        group.post({}, {1: torch.empty(3)})(0.2)
    assert 0.2 <= time.monotonic() - began_s < 20
    assert (lost.value.rank, lost.value.action, lost.value.timed_out) == (1, "receive from", True)
    with pytest.raises(PeerUnreachable):  # and stays so, since the rest of a message may still come
        group.post({1: torch.empty(3)}, {})


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_rank_sent_before_it_left_is_received_and_no_more(connected, kind):
    one, two = connected(2, kind)
    two.post({0: torch.ones(5)}, {})(30.0)
    two.abort()
    received = torch.zeros(5)
    first, second = one.post({}, {1: received}), one.post({}, {1: torch.empty(5)})
    first(30.0)
    assert received.tolist() == [1.0] * 5
    with pytest.raises(PeerUnreachable) as lost:
        second(30.0)
    assert (lost.value.rank, lost.value.timed_out) == (1, False)


@pytest.mark.parametrize("kind", KINDS)
def test_abort_wakes_every_waiter_and_leaves_no_thread(connected, kind):
    groups = connected(3, kind)
    before = {thread for thread in threading.enumerate() if thread.name.startswith("socket to rank")}
    assert len(before) >= 6
    waits = [groups[0].post({}, {other: torch.empty(3)}) for other in (1, 2)]
    waits.append(groups[0].post({1: torch.zeros(64 << 20, dtype=torch.uint8)}, {}))  # rank 1 reads none of it

    def outcome(wait):
        with pytest.raises(PeerUnreachable, match="the exchange was aborted"):
            wait(60.0)

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(outcome, wait) for wait in waits]
        groups[0].abort()
        for one in waiting:
            one.result(20.0)
    assert not any(thread.is_alive() for thread in [one._thread for one in groups[0]._connections.values()])


def header(length, number=0, magic=0x41544C4C):
    fields = struct.pack("<IIQ", magic, number, length)
    return fields + struct.pack("<I", zlib.crc32(fields))


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (header(1 << 60), "announced 1152921504606846976 bytes, and 12 were expected"),
        (header(11), "announced 11 bytes, and 12 were expected"),
        (header(12, number=3), "announced message 3, and message 0 was expected"),
        (header(12, magic=1), "no message header"),
        (header(12)[:-1] + b"\0", "no message header"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "no message header"),
        (header(12)[:7], "closed"),
        (header(12) + b"12345", "closed"),
    ],
)
def test_a_malformed_message_fails_before_a_byte_of_it_is_taken(sent, why):
    peer, own = socket_pair()
    group, into = SocketGroup(0, 2, {1: own}), torch.zeros(3)
    wait = group.post({}, {1: into})
    peer.sendall(sent)
    peer.close()
    with pytest.raises(PeerUnreachable, match=why):
        wait(20.0)
    if "closed" not in why:
        assert into.tolist() == [0.0] * 3
    group.abort()


def test_a_group_needs_a_connection_to_every_other_rank():
    with pytest.raises(ValueError, match=r"rank 0 of 3 has no connection to ranks \[1, 2\]"):
        SocketGroup(0, 3, {})


@contextmanager
def processor_time():
    """Seconds of processor time that this process takes."""
    found = []
    began_s = time.process_time()
    with suppress(PeerUnreachable):
        yield found
    found.append(time.process_time() - began_s)


def test_waiting_costs_no_processor_time(connected):
    group, _ = connected(2)
    with processor_time() as taken_s:
        group.post({}, {1: torch.empty(3)})(0.5)
    assert taken_s[0] < 0.25


# ------------------------------------------------------------------------------------------------------------------- connecting


@pytest.fixture
def servers():
    """Makes an island's server for each name, which relays to the others."""
    made = []

    def make(names):
        found = {name: SnapshotServer(HOST) for name in names}
        for server in found.values():
            server.routes = {name: one.address for name, one in found.items() if one is not server}
        made.extend(found.values())
        return found

    yield make
    for server in made:
        server.close()


def connect_all(servers, key="0123abcd", limit_s=10.0, cut=(), who=None):
    """Every member's group, or the error that it got. `cut` are pairs that cannot dial each other."""
    names = [*servers]

    def one(name):
        def dial(other, limit_s):
            if {name, other} in map(set, cut):
                raise ConnectionRefusedError(f"{other} refused")
            return DirectNetwork("").dial(servers[other].address, limit_s)

        try:
            return connect_group(names, names.index(name), key, dial, servers[name].accepted, limit_s)
        except OSError as error:
            return error

    with ThreadPoolExecutor(len(names)) as pool:
        return [*pool.map(one, who or names)]


def gathered(groups):
    try:
        return in_parallel(lambda group: GroupCollectives(group, timeout_s=20.0).all_gather_numbers(group.rank()), groups)
    finally:
        for group in groups:
            group.abort()


@pytest.mark.parametrize("cut", [(), ["ab"], ["cd", "ad"]])
def test_members_connect_directly_or_through_one_that_reaches_both(servers, cut):
    groups = connect_all(servers("abcd"), cut=cut)
    assert gathered(groups) == [[[0.0], [1.0], [2.0], [3.0]]] * 4


def test_a_member_that_no_other_reaches_fails_the_group_and_is_named(servers):
    made = servers("abc")
    for server in made.values():
        server.routes = {}  # none of them relays to the others
    outcomes = connect_all(made, cut=["ab", "ac"], limit_s=0.5)
    assert all(isinstance(one, OSError) for one in outcomes)
    assert "a cannot be reached directly, nor through another member" in str(outcomes[1])
    assert "ranks [1, 2] did not connect" in str(outcomes[0])


def test_a_missing_member_fails_the_group_within_the_limit(servers):
    began_s = time.monotonic()
    outcomes = connect_all(servers("abc"), limit_s=0.4, who=["a", "c"])
    assert all(isinstance(one, OSError) for one in outcomes)
    assert time.monotonic() - began_s < 10


def test_connections_of_a_finished_key_are_closed(servers):
    made = servers("ab")
    assert len(gathered(connect_all(made))) == 2
    with DirectNetwork("").dial(made["a"].address, 5.0) as late:
        late.sendall(b"exchange 0123abcd 1\n")
        assert late.recv(1) == b""


def test_a_server_keeps_a_bounded_number_of_connections_for_a_bounded_time():
    accepted = AcceptedConnections(most=2, limit_s=1000.0)
    pairs = [socket_pair() for _ in range(4)]
    for rank, (_, own) in enumerate(pairs[:3]):
        assert accepted.add("abc", rank, own)
    assert pairs[0][0].recv(1) == b""  # the oldest
    expired = AcceptedConnections(limit_s=0.0)
    assert expired.add("abc", 0, pairs[3][1])
    with pytest.raises(TimeoutError, match=r"ranks \[0\] did not connect"):
        expired.take("abc", [0], 0.05)
    accepted.close()
    for client, _ in pairs:
        client.settimeout(5.0)
        assert client.recv(1) == b""
        client.close()


@pytest.mark.parametrize(
    "line",
    [b"relay c status", b"relay b relay a status", b"relay b snapshot", b"exchange xyz 1", b"exchange 0123abcd -1", b"x" * 600],
)
def test_a_server_closes_what_is_no_query_and_dials_only_its_quorum(servers, line):
    made = servers("ab")
    with DirectNetwork("").dial(made["a"].address, 5.0) as client:
        client.sendall(line + b"\n")
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""
