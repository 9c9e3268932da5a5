"""Malformed frames to sockets of a process: it lives, takes no memory for sizes that a frame announces, and serves the next client.

Behind some of these sockets is code of torch and torchft, which no test in this process could survive if it ended its own.
"""

import itertools
import json
import os
import random
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

import atoll
from atoll import recipes
from atoll.core.errors import ConfigError
from atoll.engines import machine_check
from atoll.engines.elastic.gateway import Gateway
from atoll.engines.elastic.gateway_client import GatewayClient, GatewayNetwork
from atoll.engines.elastic.rendezvous import RegistryClient, Rendezvous
from atoll.engines.elastic.run_identity import RunSecrets
from atoll.engines.elastic.spec import JoinInfo
from atoll.engines.machine_check import answer_machine, ask_machine
from atoll.engines.network_interfaces import free_port
from atoll.engines.rank_store import connect_store, open_store
from tests.fuzzing import FUZZERS
from tests.test_security_sockets import ROOT

HOST, LIMIT_S, SILENCE_S = "127.0.0.1", 20.0, 0.05
MOST_BYTES = 64 << 20
"""What a process may grow by while it reads frames that announce up to 2**64 bytes each."""
HUGE = (0, 1 << 20, 1 << 31, 1 << 40, 1 << 62, (1 << 64) - 1)
FACTS = {"machine": "there"}
WORD = "0123456789ab"
"""What a machine that asks `atoll doctor` must know."""

pytestmark = pytest.mark.slow


# --------------------------------------------------------------------------------------------------------------- the process


def serve():
    """Every socket, in this process, until its standard input ends. The first line that it prints has their addresses."""
    folder, spec = Path(sys.argv[1]), atoll.Elastic(processes=1)
    RunSecrets.create(folder)
    lighthouse = f"{HOST}:{free_port(HOST)}"
    info = JoinInfo(spec.fitted(recipes.toy_sync()), spec, lighthouse, run_id=RunSecrets.read(folder).credentials.run_id)
    rendezvous = Rendezvous(info, f"{HOST}:0")
    ports = {name: int(where.rpartition(":")[2]) for name, where in (("registry", rendezvous.address), ("lighthouse", lighthouse))}
    gateway = Gateway(lambda: RunSecrets.read(folder), f"{HOST}:0", ports, lambda text: None)
    credentials = RunSecrets.invite(folder, (gateway.address,)).credentials
    client = GatewayClient(lambda: credentials, [gateway.address], "box-2")
    network = GatewayNetwork(client, credentials.run_id, refused=lambda error: None)
    store, port = open_store(HOST)
    doctor = f"{HOST}:{free_port(HOST)}"
    threading.Thread(target=answer_for_ever, args=(doctor,), daemon=True).start()
    places = {"doctor": doctor, "store": f"{HOST}:{port}", "registry": rendezvous.address, "lighthouse": lighthouse}
    forwarders = {"forwarder to the registry": network.registry, "forwarder to the lighthouse": network.lighthouse}
    sys.stdout.write(json.dumps({"info": info.to_text(), **places, **forwarders}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    del store
    os._exit(0)


def answer_for_ever(address):
    # One word, so that malformed frames reach what is read behind it.
    machine_check.secrets = SimpleNamespace(token_hex=lambda size: WORD, compare_digest=secrets.compare_digest)
    while True:
        with suppress(ConfigError):  # its last connection is not closed yet, or no machine asked
            answer_machine(address, FACTS, lambda text: None)


class Served(NamedTuple):
    process: subprocess.Popen
    addresses: dict

    def bytes_of(self, what):
        (line,) = (line for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines() if line.startswith(what))
        return int(line.split()[1]) << 10

    def forget_peak(self):
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    command = [sys.executable, "-c", f"from {__name__} import serve; serve()", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    with (
        (folder / "errors").open("w") as errors,
        subprocess.Popen(command, stdin=-1, stdout=-1, stderr=errors, env=environment, text=True) as process,
    ):
        yield Served(process, json.loads(process.stdout.readline()))
        process.stdin.close()


# ----------------------------------------------------------------------------------------------------------------- the frames

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
STRANGERS = [b"", b"\n", b"\0" * 5000, b"[" * 100_000, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", PREFACE]


def damaged(frames, count):
    """So many damaged frames, the same each time: with flipped bits, cut, repeated and random bytes."""
    chance = random.Random(0)
    for number in range(count):
        frame = bytearray(chance.choice(frames))
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(frame) + 1)
            if number % 4 == 0:
                del frame[at:]
            elif number % 4 == 1:
                frame[at:at] = chance.randbytes(chance.randrange(9))
            elif at < len(frame):
                frame[at] ^= 1 << chance.randrange(8)
        yield bytes(frame)


def with_damaged(frames, count=250):
    return [*frames, *STRANGERS, *damaged(frames, count)]


def doctor_frames():
    right = {"check": machine_check._VERSION, "invited": WORD, "facts": FACTS, "port": 0, "word": "0123"}
    values = [None, True, -1, 10**400, 1e308, float("nan"), "x" * 5000, "\0", [], {}, [[]] * 100, {"a": {"b": 1}}, 1 << 16, 1]
    changed = [{**right, name: value} for name in right for value in values]
    return with_damaged(
        [json.dumps(record).encode() + b"\n" for record in [right, *changed]] + [b"9" * (1 << 20), b"{" * (1 << 20)]
    )


def store_frames():
    """Requests of a TCPStore: a number, then keys and values behind their lengths, or numbers of keys."""
    greeting, key = struct.pack("<BI", 0, 0x3C85F7CE), struct.pack("<Q", 1) + b"k"
    frames = [struct.pack("<BI", 0, 0), struct.pack("<BQ", 1, 1 << 40)]
    for request, size in itertools.product(range(24), HUGE):
        start, announced = greeting + bytes([request]), struct.pack("<Q", size)
        frames += [start + announced, start + key + announced, start + announced + 3 * key, start + key + key + announced]
    return with_damaged(frames)


def http2(kind, flags, payload, size=None):
    """A frame of HTTP/2 on stream 1, or of the connection, which may announce another size than that of its payload."""
    stream = 0 if kind in (4, 6, 7) else 1
    return (
        struct.pack(">I", len(payload) if size is None else size)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload
    )


def call(method, message, size=None):
    """A call by gRPC, which may announce another size than that of its message."""
    text = {":method": "POST", ":scheme": "http", ":path": f"/torchft.LighthouseService/{method}", ":authority": "x"}
    text |= {"content-type": "application/grpc", "te": "trailers"}
    packed = b"".join(b"\0" + bytes([len(k)]) + k.encode() + bytes([len(v)]) + v.encode() for k, v in text.items())
    prefix = struct.pack(">BI", 0, len(message) if size is None else size)
    return PREFACE + http2(4, 0, b"") + http2(1, 4, packed) + http2(0, 1, prefix + message)


def lighthouse_frames():
    sizes = (0, 1, 1 << 14, (1 << 24) - 1)
    frames = [PREFACE + http2(4, 0, b"") + http2(kind, 0, b"x" * 20, size) for kind in range(12) for size in sizes]
    settings = b"".join(struct.pack(">HI", name, value) for name in range(1, 7) for value in (0, (1 << 24) - 1, (1 << 32) - 1))
    frames.append(PREFACE + http2(4, 0, settings))
    for method, field in itertools.product(
        ("Heartbeat", "Quorum"), (b"\x0a\x03abc", b"\x0a\x05\x0a\x03abc", b"\x0a" + b"\xff" * 9 + b"\1")
    ):
        frames += [call(method, field), *(call(method, field, size % (1 << 32)) for size in HUGE)]
    head = "HTTP/1.1\r\nHost: x\r\nConnection: close"
    for verb, path in itertools.product(
        ("GET", "POST"), ("/", "/status", "/replica/x/kill", "/replica/%00/kill", "/" + "a" * 70_000)
    ):
        frames.append(f"{verb} {path} {head}\r\n\r\n".encode())
        frames += [f"{verb} {path} {head}\r\nContent-Length: {size}\r\n\r\nabc".encode() for size in HUGE]
        frames.append(f"{verb} {path} {head}\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nabc".encode())
    return with_damaged(frames)


def dialled(address):
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), LIMIT_S)


def repeated(dial):
    """doctor answers one machine, and is then started again: until it listens, connections are refused or reset."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        try:
            return dial()
        except ConnectionError:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)


def send(address, frame, ends):
    """Send a frame, and read what comes until the other side closes the connection. If `ends`, it knows that no more will come;
    else it may wait for more, and so does this, for a moment."""
    with repeated(lambda: dialled(address)) as connection, suppress(OSError):
        connection.sendall(frame)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        else:
            connection.settimeout(SILENCE_S)
        while connection.recv(1 << 16):
            pass


# ---------------------------------------------------------------------------------------------------------------- the clients


def asks_doctor(address, served):
    assert repeated(lambda: ask_machine(f"{WORD}@{address}", {}, None)).facts == FACTS


def uses_store(address, served):
    host, _, port = address.rpartition(":")
    connect_store(host, int(port)).set("this", "answers")
    assert connect_store(host, int(port)).get("this") == b"answers"


def reads_registry(address, served):
    assert RegistryClient(address, LIMIT_S).join_info() == served.addresses["info"]


def asks_lighthouse(address, served):
    coordination = pytest.importorskip("torchft.coordination")
    client = coordination.LighthouseClient(f"http://{address}", connect_timeout=timedelta(seconds=LIMIT_S))
    client.heartbeat(replica_id="island", timeout=timedelta(seconds=LIMIT_S))


class Target(NamedTuple):
    fuzzer: str
    frames: object
    is_served: object
    ends: bool = True


STORES = "stores of ranks and of process groups, and the registry's port"
TARGETS = {
    "doctor": Target("listener of `atoll doctor`", doctor_frames, asks_doctor),
    "store": Target(STORES, store_frames, uses_store),
    "registry": Target(STORES, store_frames, reads_registry),
    "lighthouse": Target("lighthouse", lighthouse_frames, asks_lighthouse, ends=False),
    "forwarder to the registry": Target("forwarders", store_frames, reads_registry),
    "forwarder to the lighthouse": Target("forwarders", lighthouse_frames, asks_lighthouse, ends=False),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_process_lives_and_serves_after_malformed_frames_without_memory_for_what_they_announce(served, name):
    target, address = TARGETS[name], served.addresses[name]
    target.is_served(address, served)  # what the first client needs is loaded
    frames, before = target.frames(), served.bytes_of("VmRSS")
    served.forget_peak()
    for frame in frames:
        send(address, frame, target.ends)
        assert served.process.poll() is None, f"it ended with {served.process.returncode} after {frame[:200]!r}"
    target.is_served(address, served)
    grown = served.bytes_of("VmHWM") - before
    assert grown < MOST_BYTES, f"it took {grown:,} bytes more"
    assert len(frames) >= FUZZERS[target.fuzzer].slow / sum(one.fuzzer == target.fuzzer for one in TARGETS.values())
