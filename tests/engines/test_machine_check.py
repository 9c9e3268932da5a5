"""Two machines check each other by a protocol that executes nothing, bounds everything, and ends."""

import json
import os
import re
import socket
import threading
from contextlib import suppress

import pytest

from atoll.core.errors import ConfigError
from atoll.engines import machine_check
from atoll.engines.machine_check import answer_machine, ask_machine
from atoll.engines.network_interfaces import NetworkInterface
from tests.listening_sockets import listening_sockets

FACTS = {"atoll": "0.1.0", "machine": "here"}


@pytest.fixture
def answering():
    """A machine that answers, its address, and later what it found or how it ended."""
    said, ended, port = [], {}, threading.Event()

    def log(line):
        said.append(line)
        port.set()

    def run(limit_s):
        try:
            ended["found"] = answer_machine("127.0.0.1:0", {**FACTS, "machine": "there"}, log, limit_s)
        except ConfigError as error:
            ended["error"] = error

    def start(limit_s=20.0):
        thread = threading.Thread(target=run, args=(limit_s,))
        thread.start()
        assert port.wait(10)
        return said[0].split()[-1], thread, ended, said

    return start


def test_both_learn_the_others_facts_its_clock_and_whether_they_reach_each_other(answering, monkeypatch):
    address, thread, ended, _ = answering()
    found = ask_machine(address, FACTS, "127.0.0.1:0")
    thread.join()
    assert (found.facts["machine"], ended["found"].facts["machine"]) == ("there", "here")
    assert (found.back, ended["found"].back) == ("", "")
    assert abs(found.skew_s) < 1
    assert ended["found"].skew_s == -found.skew_s
    assert found.connect_s < 5


def test_without_an_address_of_its_own_the_one_that_asks_listens_nowhere(answering):
    address, thread, ended, _ = answering()
    before = listening_sockets(os.getpid())
    found = ask_machine(address, FACTS, None)
    thread.join()
    assert (found.back, ended["found"].back) == (None, None)
    assert listening_sockets(os.getpid()) <= before


def test_a_machine_that_cannot_connect_back_says_why(answering, monkeypatch):
    address, thread, _, _ = answering()
    port = socket.create_server(("127.0.0.1", 0))
    closed = port.getsockname()[1]
    port.close()
    monkeypatch.setattr(machine_check._BackConnection, "__init__", lambda self, listen, word: setattr(self, "_listener", None))
    monkeypatch.setattr(machine_check._BackConnection, "port", closed, raising=False)
    found = ask_machine(address, FACTS, "127.0.0.1:0")
    thread.join()
    assert "refused" in found.back


BAD = {
    "no line": b"x" * (20 << 10),
    "no JSON": b"hello\n",
    "deep JSON": b"[" * 10000 + b"\n",
    "another program": b'{"a": 1}\n',
    "too many facts": {"facts": {str(n): "" for n in range(100)}},
    "a long fact": {"facts": {"a": "x" * 1000}},
    "a fact for the terminal": {"facts": {"a": "\x1b[2J"}},
    "a number as a fact": {"facts": {"a": 1}},
    "no port": {"facts": {}},
    "no word": {"invited": "", "facts": {}, "port": 0, "word": ""},
    "a port that is none": {"facts": {}, "port": 1e300, "word": ""},
    "a number that is none": {"facts": {}, "port": True, "word": ""},
}


@pytest.mark.parametrize("line", BAD.values(), ids=BAD)
def test_a_stranger_ends_neither_the_one_that_answers_nor_the_check(answering, line):
    address, thread, ended, said = answering()
    word, _, where = address.partition("@")
    host, port = where.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as stranger:
        stranger.sendall(line if isinstance(line, bytes) else json.dumps({"check": 2, "invited": word, **line}).encode() + b"\n")
        stranger.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            stranger.recv(1)
    ask_machine(address, FACTS, None)
    thread.join()
    assert ended["found"].facts == FACTS
    assert "is no `atoll doctor`" in said[1]


def test_a_machine_without_the_word_is_refused_and_told_nothing(answering):
    address, thread, ended, said = answering()
    with pytest.raises(ConfigError, match="answers those alone who know the word"):
        ask_machine(address.partition("@")[2], FACTS, "127.0.0.1:0")
    ask_machine(address, FACTS, None)
    thread.join()
    assert "it does not know the word" in said[1]
    assert ended["found"].facts == FACTS


def test_an_address_with_another_program_is_told_apart():
    def greet(listener):
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH\r\n")
            connection.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=greet, args=(other,))
        thread.start()
        with pytest.raises(ValueError, match="no JSON"):
            ask_machine(f"127.0.0.1:{other.getsockname()[1]}", FACTS, None)
        thread.join()


def test_the_one_that_answers_ends_when_no_machine_asks():
    with pytest.raises(ConfigError, match="no machine asked at 127"):
        answer_machine("127.0.0.1:0", FACTS, lambda line: None, limit_s=0.05)


@pytest.mark.parametrize("listen", ["192.0.2.250:0", "nowhere", "127.0.0.1:99999", "127.0.0.1:x", "9", ":9"])
def test_an_address_that_this_machine_cannot_listen_at_is_refused(listen):
    with pytest.raises(ConfigError, match="this machine cannot listen there"):
        answer_machine(listen, FACTS, lambda line: None)


def test_a_name_that_is_a_loopback_address_here_is_refused():
    name = "127.1"  # which the system's resolver reads as 127.0.0.1
    for listen in (
        lambda: answer_machine(f"{name}:0", FACTS, lambda line: None),
        lambda: machine_check._BackConnection(f"{name}:0", "word"),
    ):
        with pytest.raises(ConfigError, match=rf"--listen {name}:0: {name} is 127.0.0.1 here, which no other machine reaches"):
            listen()


def test_the_one_that_answers_on_all_interfaces_names_addresses_that_others_dial(monkeypatch):
    said = []
    found = [NetworkInterface("eth0", "192.0.2.7"), NetworkInterface("eth0", "2001:db8::7"), NetworkInterface("eth1", "10.0.0.7")]
    monkeypatch.setattr(machine_check, "reachable_interfaces", lambda: found)
    with pytest.raises(ConfigError, match="no machine asked"):
        answer_machine("0.0.0.0:0", FACTS, said.append, limit_s=0.0)
    address = r"(?P<word>\w+@)192\.0\.2\.7(?P<port>:\d+), or atoll doctor (?P=word)10\.0\.0\.7(?P=port)"
    assert re.search(rf"on the other machine: atoll doctor {address}$", said[0])
