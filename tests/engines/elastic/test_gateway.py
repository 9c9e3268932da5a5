"""The gateway, over TLS on loopback: who is let in, what strangers can do, and what is forwarded."""

import json
import math
import os
import re
import select
import shutil
import socket
import ssl
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.core.verified_files import read_record, sealed
from atoll.engines import socket_transport
from atoll.engines.elastic import gateway as module, gateway_client
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.gateway import Gateway
from atoll.engines.elastic.gateway_client import GatewayClient, GatewayNetwork, machine_client
from atoll.engines.elastic.gateway_protocol import GatewayRefused, WrongGateway, wire_version
from atoll.engines.elastic.rendezvous import RegistryClient
from atoll.engines.elastic.rendezvous_health import RendezvousHealth
from atoll.engines.elastic.run_identity import RunSecrets
from atoll.engines.elastic.snapshot_server import IslandPhase, IslandStatus, SnapshotServer, query_status
from atoll.engines.socket_transport import splice

HOST, LIMIT_S = "127.0.0.1", 10.0
DOCS = Path(__file__).parents[3] / "docs"


class Echo:
    """A service that sends back what it receives, until it has received a full stop."""

    def __init__(self):
        self._server = socket.create_server((HOST, 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with connection, suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)
                if data.endswith(b"."):
                    return

    def close(self):
        self._server.close()


class Site:
    """A run's gateway with an echo for a registry, and its join files."""

    def __init__(self, folder):
        folder.mkdir(exist_ok=True)
        RunSecrets.create(folder)
        self.folder, self.logged, self.echo = folder, [], Echo()
        self.gateway = Gateway(lambda: RunSecrets.read(folder), f"{HOST}:0", {"registry": self.echo.port}, self.logged.append)
        self.address = self.gateway.address
        self.host, self.port = HOST, int(self.address.rpartition(":")[2])

    def invite(self):
        return RunSecrets.invite(self.folder, (self.address,)).credentials

    def client(self, credentials=None, name="box-1", addresses=None):
        credentials = credentials or self.invite()
        return GatewayClient(lambda: credentials, addresses or [self.address], name)

    def close(self):
        self.gateway.close()
        self.echo.close()


@pytest.fixture
def site(tmp_path):
    with closing(Site(tmp_path / "run")) as one:
        yield one


@pytest.fixture
def other(tmp_path):
    """Another run."""
    with closing(Site(tmp_path / "other")) as one:
        yield one


class Accepting:
    """A server that does this with each connection."""

    def __init__(self, port, serve):
        self._server = socket.create_server((HOST, port))
        threading.Thread(target=self._accept, args=(serve,), daemon=True).start()

    def _accept(self, serve):
        with suppress(OSError):
            while True:
                serve(self._server.accept()[0])

    def close(self):
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def address_of(place):
    host, _, port = place.rpartition(":")
    return host, int(port)


def echoes(stream, data=b"hello."):
    received = b""
    with stream, suppress(ConnectionError):
        stream.sendall(data)
        while chunk := stream.recv(1 << 16):
            received += chunk
    return received == data


def wait_until(condition):
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


# ----------------------------------------------------------------------------------------------------------------- members


def test_a_member_reaches_a_service_and_every_byte_arrives_both_ways(site):
    data = os.urandom(5_000_000).replace(b".", b",") + b"."  # which the echo takes for the end
    plain, end = socket.socketpair()
    with ThreadPoolExecutor(2) as pool, site.client().open("registry", LIMIT_S) as stream, plain:
        assert stream.version() == "TLSv1.3"
        pool.submit(splice, stream, end)
        sending = pool.submit(plain.sendall, data)
        received = bytearray()
        while len(received) < len(data):
            received += plain.recv(1 << 20)
        sending.result()
    assert received == data


def test_a_half_closed_stream_still_carries_the_answer(site):
    class Late(Echo):
        def _serve(self, connection):
            with connection:
                received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
                connection.sendall(received[::-1])

    with closing(Late()) as late:
        site.gateway._services["late"] = late.port
        one, two = socket.socketpair()
        with ThreadPoolExecutor(1) as pool, one:
            pool.submit(splice, two, site.client().open("late", LIMIT_S))
            one.sendall(b"ab")
            one.shutdown(socket.SHUT_WR)
            one.settimeout(LIMIT_S)
            assert b"".join(iter(lambda: one.recv(9), b"")) == b"ba"


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_stream_that_is_idle_keeps_no_memory_also_after_it_has_carried_bytes(monkeypatch):
    monkeypatch.setattr(socket_transport, "_IDLE_S", 0.01)
    data, before, count = bytes(1 << 20), resident_bytes(), 64
    with ThreadPoolExecutor(2 * count) as pool, ExitStack() as stack:
        for _ in range(count):
            (one, inner), (outer, other) = socket.socketpair(), socket.socketpair()
            pool.submit(splice, inner, outer)
            for source, sink in ((stack.enter_context(closing(one)), other), (stack.enter_context(closing(other)), one)):
                sending, received = pool.submit(source.sendall, data), 0
                while received < len(data):
                    received += len(sink.recv(1 << 16))
                sending.result()
        wait_until(lambda: resident_bytes() - before < count * socket_transport._RELAY_BYTES)  # of the two buffers of each


def test_only_islands_of_the_gateways_machine_are_known_to_have_ended_by_their_ports(site):
    client, run_id = site.client(), site.invite().run_id
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        local = GatewayNetwork(client, run_id, registry=f"{HOST}:1", lighthouse=f"{HOST}:1", islands=2, refused=bool)
        assert not local.refuses(f"island:island-0001:{port}")
    with closing(local), closing(GatewayNetwork(client, run_id, refused=bool)) as joiner:
        assert local.refuses(f"island:island-0001:{port}")
        for remote in (f"island:box-2:{port}", "island:box-2", f"island:island-0002:{port}", "island:island-0001"):
            assert not local.is_trusted(remote), "it is on another machine, whatever it says"
            assert not local.refuses(remote)
        assert not joiner.refuses(f"island:island-0001:{port}")


@pytest.mark.parametrize(
    ("name", "folder", "accepted"),
    [
        ("island-0000", "run", True),
        ("island-0001", "island-0001", True),
        ("box-2", "run", False),
        ("box-2", "box-2", True),
        ("box-2", "box-3", False),
        ("run", "run", False),  # a copy of an island with this name
    ],
)
def test_the_runs_folder_is_believed_of_islands_that_the_run_starts_and_a_copy_of_its_own_island(site, name, folder, accepted):
    with closing(GatewayNetwork(site.client(), site.invite().run_id, refused=bool)) as joiner:
        assert joiner.accepts_folder(name, folder) == accepted


def test_islands_reach_each_other_by_dialling_out_only(site):
    """A status query from one joiner to another, both of which have no open port."""
    status = IslandStatus("box-2", False, phase=IslandPhase.JOINED, run=site.invite().run_id)
    with (
        closing(SnapshotServer(HOST, status.to_json, network=DirectNetwork(HOST, run_id=status.run))) as server,
        ExitStack() as stack,
    ):
        networks = [
            stack.enter_context(closing(GatewayNetwork(site.client(name=name), status.run, refused=pytest.fail)))
            for name in ("box-1", "box-2")
        ]
        networks[1].serve(server.adopt)
        status.address = networks[1].address_of(server.port)
        assert status.address == "island:box-2"
        for _ in range(12):  # more than wait at a time
            assert query_status("box-2", status.address, LIMIT_S, networks[0]) == status
        assert query_status("box-3", "island:box-3", 0.3, networks[0]) is None, "no such island"
        with closing(GatewayNetwork(site.client(name="box-1"), "run-0000000000000000", refused=pytest.fail)) as another:
            assert query_status("box-2", status.address, LIMIT_S, another) is None, "of another run"


def test_a_machine_whose_run_folder_is_lost_dials_the_gateway_with_the_last_credentials_that_it_read(site):
    client, late = (machine_client(site.folder, site.address, "island-0000") for _ in range(2))
    client.open("registry", LIMIT_S).close()
    shutil.rmtree(site.folder)
    assert echoes(client.open("registry", LIMIT_S))
    with closing(GatewayNetwork(late, "", refused=pytest.fail)) as network, pytest.raises(ExchangeFailed) as failed:
        network.check_reaches(network.registry, LIMIT_S)
    assert str(failed.value) == f"{site.folder} has no secrets/identity.json: no machine has been admitted to it yet."


def test_a_forwarded_port_leads_to_the_service(site):
    network = GatewayNetwork(site.client(), "", refused=pytest.fail)
    host, _, port = network.registry.rpartition(":")
    for _ in range(2):
        assert echoes(socket.create_connection((host, int(port)), timeout=LIMIT_S))
    network.check()
    site.gateway.close()
    with pytest.raises(ExchangeFailed, match="no gateway answers"):
        network.check()
    assert not echoes(socket.create_connection((host, int(port)), timeout=LIMIT_S))
    network.close()


def test_while_a_gateway_is_away_few_requests_dial_it_torch_prints_nothing_and_the_island_says_why(site, capfd):
    """torchft sends ten heartbeats a second through the forwarded port, and the registry is asked twice a second."""
    site.gateway.close()
    dialled, logged = [], []
    with closing(Accepting(site.port, lambda connection: (dialled.append(1), connection.close()))):
        network = GatewayNetwork(site.client(), "", refused=pytest.fail)
        registry = RegistryClient(network.registry, network=network)
        network.serve(lambda stream: stream.close(), logged.append)
        for _ in range(40):
            with pytest.raises(ExchangeFailed, match=f"the gateway at {site.address} does not answer"):
                registry.names()
            assert not echoes(socket.create_connection(address_of(network.lighthouse), timeout=LIMIT_S))
    (text,) = logged
    assert text.startswith(f"the gateway at {site.address} does not answer (")
    assert len(dialled) < 40, "of 80 requests, and 4 threads that serve"
    assert "TCPStore" not in capfd.readouterr().err
    back = Gateway(lambda: RunSecrets.read(site.folder), site.address, {"registry": site.echo.port}, bool)
    wait_until(lambda: echoes(socket.create_connection(address_of(network.registry), timeout=LIMIT_S)))
    network.close()
    back.close()


def test_an_island_elsewhere_that_finds_only_gateways_of_other_certificates_ends_and_says_why(site, monkeypatch):
    monkeypatch.setattr(gateway_client, "_WRONG_S", 0.5)
    ended, logged, reached = [], [], site.client()
    with (
        closing(GatewayNetwork(site.client(), "", refused=ended.append)) as network,
        closing(GatewayNetwork(reached, "", registry=f"{HOST}:1", lighthouse=f"{HOST}:1", refused=pytest.fail)) as local,
    ):
        for one in (network, local):
            one.serve(lambda stream: stream.close(), logged.append)
        RunSecrets.rotate(site.folder)
        wait_until(lambda: ended)
        wait_until(lambda: time.monotonic() - reached.outage.wrong_since_s > 1.0)
    (error,) = ended
    assert isinstance(error, WrongGateway)
    assert "or the run's certificates were rotated: ask for a new join file" in str(error)
    assert str(error).endswith("This island has found no gateway of its run for 0 s, and ends.")
    assert any(text in str(error) for text in logged)


def test_an_island_whose_name_another_identity_has_is_not_reached_by_it(site):
    first = GatewayNetwork(site.client(name="box-1"), "", refused=pytest.fail)
    first.serve(lambda stream: stream.close())
    wait_until(lambda: "box-1" in site.gateway._islands)
    with pytest.raises(OSError, match="box-1 is the name of another island"):
        site.client(name="box-1").open("serve", LIMIT_S)
    with pytest.raises(GatewayRefused, match="islands that the run starts itself"):
        site.client(name="island-0000").open("serve", LIMIT_S)
    first.close()


def test_an_island_that_dies_is_known_to_be_gone(site):
    stream = site.client(name="box-1").open("serve", LIMIT_S)
    wait_until(lambda: "box-1" in site.gateway._islands)
    stream.close()
    with pytest.raises(OSError, match="box-1 is not connected"):
        site.client(name="box-2").open("island:box-1", 1.5)
    wait_until(lambda: not site.gateway._islands)


# --------------------------------------------------------------------------------------------------------------- strangers


def test_a_stranger_without_a_certificate_reaches_nothing(site):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(socket.create_connection((HOST, site.port), timeout=LIMIT_S)) as stream:
        with suppress(OSError):  # it may be closed by now
            stream.sendall(b"{}\n")
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            stream.recv(1)


def test_an_older_tls_is_refused(site):
    context = site.invite()._context(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        context.wrap_socket(socket.create_connection((HOST, site.port), timeout=LIMIT_S), server_hostname="x")


def test_certificates_of_another_run_are_refused_by_both_sides(site, other):
    foreign = other.invite()
    with pytest.raises(WrongGateway, match=f"certificate that is not of {foreign.run_id}"):
        site.client(foreign).open("registry", LIMIT_S)
    own = site.invite()
    with pytest.raises(WrongGateway, match="does not accept this machine's certificate"):
        site.client(replace(own, certificate=foreign.certificate, key=foreign.key)).open("registry", LIMIT_S)


def test_the_right_address_is_found_among_others(site, other):
    own = site.invite()
    assert echoes(site.client(own, addresses=[f"{HOST}:1", other.address, site.address]).open("registry", LIMIT_S))
    with pytest.raises(OSError, match="refused"):  # the first may be back later
        site.client(own, addresses=[f"{HOST}:1", other.address]).open("registry", LIMIT_S)


def test_a_join_file_cannot_pose_as_the_run(site, tmp_path):
    member = site.invite()
    server = socket.create_server((HOST, 0))

    def pose():
        with server, suppress(OSError), server.accept()[0] as connection:
            member.server_context().wrap_socket(connection, server_side=True)

    threading.Thread(target=pose, daemon=True).start()
    with pytest.raises(WrongGateway):
        site.client(addresses=[f"{HOST}:{server.getsockname()[1]}"]).open("registry", LIMIT_S)


def test_a_revoked_join_file_loses_its_connections_and_gets_no_new_ones(site):
    good, bad = site.invite(), site.invite()
    streams = [site.client(one).open("registry", LIMIT_S) for one in (good, bad)]
    ended = threading.Event()
    joined = GatewayNetwork(site.client(bad), "", refused=lambda error: ended.set())
    joined.serve(lambda stream: stream.close())
    RunSecrets.revoke(site.folder, bad.identity)
    with streams[1] as stream:
        assert stream.recv(1) == b""
    assert ended.wait(LIMIT_S), "the island ends"
    assert echoes(streams[0])
    with pytest.raises(GatewayRefused, match=f"the join file {bad.identity} was revoked"):
        site.client(bad).open("registry", LIMIT_S)
    joined.close()


def test_a_certificate_that_the_library_cannot_take_ends_no_checks(site):
    """The file has a right digest: a program has written it so."""
    path, bad = site.folder / "secrets" / "identity.json", site.invite()
    record = read_record(path)
    with site.client(bad).open("registry", LIMIT_S) as stream:
        path.write_text(sealed({**record, "credentials": {**record["credentials"], "authority": "\u00e9"}}))
        wait_until(lambda: site.logged)
        path.write_text(sealed(record))
        RunSecrets.revoke(site.folder, bad.identity)
        assert stream.recv(1) == b""
    assert len(site.logged) == 1
    assert "the gateway's checks" in site.logged[0]


class Meeting(Counter):
    """A count of refusals whose first new entry waits until the entries are read, or for a moment if they are not."""

    def __init__(self):
        super().__init__(others=1)
        self.adding, self.reading, self.added = (threading.Event() for _ in range(3))

    def __missing__(self, key):
        self.adding.set()
        self.reading.wait(1.0)
        return 0

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.added.set()

    def items(self):
        for item in super().items():
            self.reading.set()
            self.added.wait(2.0)
            yield item


def test_a_refusal_that_is_counted_while_refusals_are_logged_is_logged_and_ends_no_checks(site, monkeypatch):
    monkeypatch.setattr(module, "_LOG_S", math.inf)
    meeting = site.gateway._refused = Meeting()
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(site.client(name="island-0000").open, "registry", LIMIT_S)
        assert meeting.adding.wait(LIMIT_S)
        monkeypatch.setattr(module, "_LOG_S", 0.0)
        with pytest.raises(GatewayRefused):
            opened.result()
    wait_until(lambda: "islands that the run starts" in " ".join(site.logged))
    assert "others" in " ".join(site.logged)


def test_after_a_rotation_only_new_join_files_are_admitted(site):
    old = site.invite()
    stream = site.client(old).open("registry", LIMIT_S)
    RunSecrets.rotate(site.folder)
    with stream:
        assert stream.recv(1) == b""
    wait_until(lambda: site.logged)
    with pytest.raises(WrongGateway):
        site.client(old).open("registry", LIMIT_S)
    assert echoes(site.client().open("registry", LIMIT_S))


def asked(site, text=b"", **changes):
    """What the gateway answers to a first line: to a valid one with these changes, or to this text."""
    credentials = site.invite()
    about = {
        "run": credentials.run_id,
        "atoll": wire_version(),
        "name": "a",
        "to": "registry",
        "limit_s": 5,
    }
    context = credentials.client_context()
    plain = socket.create_connection((HOST, site.port), timeout=LIMIT_S)
    with context.wrap_socket(plain, server_hostname=credentials.run_id) as stream:
        with suppress(OSError):  # it may close the connection while this writes
            stream.sendall(text or json.dumps({**about, **changes}).encode() + b"\n")
        try:
            return stream.recv(1000)
        except OSError:
            return b""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, '"ok": true'),
        ({"run": "run-0123456789abcdef"}, "and not run-0123456789abcdef"),
        ({"atoll": "0.0.1"}, "and this island is of atoll 0.0.1"),
        ({"atoll": version("atoll")}, f'the run is of atoll {wire_version()}, and this island is of atoll {version("atoll")}"'),
        ({"name": "a\n:b"}, "letters, digits"),
        ({"name": ["a"]}, "letters, digits"),
        ({"to": "ssh"}, "there is no service 'ssh'"),
        ({"to": "island:../x"}, "there is no service"),
        ({"to": None}, "there is no service"),
        ({"limit_s": 1e9}, "limit_s is a number"),
        ({"limit_s": "x"}, "limit_s is a number"),
    ],
)
def test_the_first_line_is_checked_and_refused_in_words(site, changes, says):
    assert says in asked(site, **changes).decode()


@pytest.mark.parametrize("text", [b"x" * 100_000, b"[1]\n", b"\xff\n", b"[" * 4000 + b"\n", b"{}\n", b'{"run": NaN}\n'])
def test_what_is_no_first_line_is_dropped(site, text):
    assert b'"ok"' not in asked(site, text=text)
    assert echoes(site.client().open("registry", LIMIT_S)), "others are served"


def test_half_open_handshakes_are_dropped_and_hinder_no_member(site, monkeypatch):
    monkeypatch.setattr(module, "HANDSHAKE_S", 2.0)  # enough for the member on a busy machine
    before = threading.active_count()
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((HOST, site.port), timeout=LIMIT_S)) for _ in range(300)]
        slow = stack.enter_context(socket.create_connection((HOST, site.port), timeout=LIMIT_S))
        assert threading.active_count() - before <= module.MAX_UNAUTHENTICATED + 50  # those that are closed end in a moment
        assert echoes(site.client().open("registry", LIMIT_S))
        for byte in b"\x16\x03\x01\x02\x00":  # a byte now and then does not prolong it
            with suppress(OSError):
                slow.send(bytes([byte]))
            time.sleep(0.15)
        for connection in (*silent, slow):
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    wait_until(lambda: not site.gateway._unauthenticated and threading.active_count() <= before + 4)


def test_as_many_handshakes_as_are_allowed_stay_open_and_one_more_closes_the_oldest(site):
    with ExitStack() as stack:
        address = HOST, site.port
        silent = [stack.enter_context(socket.create_connection(address, timeout=LIMIT_S)) for _ in range(64)]
        wait_until(lambda: len(site.gateway._unauthenticated) == 64)
        stack.enter_context(socket.create_connection(address, timeout=LIMIT_S))
        assert silent[0].recv(1) == b""
        wait_until(lambda: len(site.gateway._unauthenticated) == 64)
        assert not select.select(silent[1:], [], [], 0)[0]


def test_a_connection_that_gets_no_thread_is_closed_and_the_gateway_serves_the_next(site, monkeypatch):
    client, start = site.client(), threading.Thread.start

    def no_thread(thread):
        if thread.name == "gateway stream":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with socket.create_connection((HOST, site.port), timeout=LIMIT_S) as one:
            assert one.recv(1) == b""
    assert not site.gateway._unauthenticated
    assert echoes(client.open("registry", LIMIT_S))


def test_a_gateway_that_accepts_no_connection_any_more_does_not_answer_its_supervisor(site):
    def answers(gateway):
        with closing(RendezvousHealth(f"{HOST}:1", f"{HOST}:1", gateway, limit_s=0.5)) as health:
            return health._gateway_answers()

    with socket.create_server((HOST, 0)) as deaf:
        assert not answers(site.client(addresses=[f"{HOST}:{deaf.getsockname()[1]}"]))
    assert answers(machine_client(site.folder, site.address, "supervisor"))
    site.gateway._most = 0
    assert answers(machine_client(site.folder, site.address, "supervisor")), "it says that it has too many connections"
    (site.folder / "secrets" / "identity.json").write_text("damaged")
    assert answers(machine_client(site.folder, site.address, "supervisor")), "nothing can be known of it"


def test_a_gateway_that_answers_a_byte_at_a_time_does_not_answer(site, monkeypatch):
    hurried, dripped = threading.Event(), threading.Event()

    def slow(connection, **record):
        for _ in range(400):
            if not hurried.wait(0.05):
                connection.sendall(b" ")
        dripped.set()

    client = site.client()
    monkeypatch.setattr(module, "send_line", slow)
    with pytest.raises(TimeoutError):  # and not the error of a connection that was closed
        client.open("registry", 0.5)
    assert not dripped.is_set()
    hurried.set()


def test_a_join_file_leaves_as_many_connections_free_as_it_has(site):
    site.gateway._most = 6
    greedy, modest = site.client(), site.client()
    with ExitStack() as stack:
        streams = [stack.enter_context(greedy.open("registry", LIMIT_S)) for _ in range(3)]
        with pytest.raises(OSError, match=r"too many connections: 3 of \w+, 3 of 6 in all"):
            greedy.open("registry", LIMIT_S)
        assert echoes(modest.open("registry", LIMIT_S))
        streams[0].close()
        wait_until(lambda: len(site.gateway._connections) == 2)
        assert echoes(greedy.open("registry", LIMIT_S))
        site.gateway._most = 2
        with pytest.raises(OSError, match="2 of 2 in all"):
            modest.open("registry", LIMIT_S)


def test_thirty_joiners_on_one_join_file_have_the_connections_that_they_need(site):
    """As many as the page on two sites says: each keeps a few, and all connect with each other."""
    ((joiners, told),) = re.findall(r"(\d+) joiners need about ([\d,]+) connections", (DOCS / "two_sites.md").read_text())
    needed = int(joiners) * (int(joiners) - 1) + 7 * int(joiners)
    assert f"{needed:,}" == told
    if site.gateway._most < 2 * needed:
        pytest.skip(f"this machine allows {site.gateway._most} connections")
    client = site.client(name="box")
    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        for stream in pool.map(lambda _: client.open("serve", 6 * LIMIT_S), range(needed)):
            stack.callback(stream.close)
        assert echoes(site.client().open("registry", 6 * LIMIT_S)), "another join file is admitted"


def test_refusals_are_logged_in_one_line_however_many(site):
    for _ in range(30):
        asked(site, to="ssh")
    wait_until(lambda: site.logged)
    assert len(site.logged) == 1
    assert "there is no service 'ssh'" in site.logged[0]


# ---------------------------------------------------------------------------------------------------------------- join files


def test_secrets_can_be_read_by_their_owner_only(site):
    modes = {
        path.name: oct(path.stat().st_mode & 0o777) for path in (site.folder / "secrets", *(site.folder / "secrets").iterdir())
    }
    assert modes == {"secrets": "0o700", "identity.json": "0o600"}
    assert "PRIVATE KEY" not in repr(RunSecrets.read(site.folder))
    with pytest.raises(ConfigError, match="--revoke x: no join file of this run has that id"):
        RunSecrets.revoke(site.folder, "x")
