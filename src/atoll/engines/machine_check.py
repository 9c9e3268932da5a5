"""What a machine sends to another about itself, and whether the two reach each other, for `atoll doctor`.

One machine answers, at the address that its user gave; the other asks, with the word that the first has printed, and is refused
without. They exchange three lines of JSON, whose facts are text of checked length. If the one that asks has an address to be
reached at, the other connects back to its port. All of it is plain text.

    asks      {"check": 2, "invited": "...", "facts": {...}, "port": 4711, "word": "..."}
    answers   {"check": 2, "facts": {...}, "unix_s": 1.5, "back": ""}       back: why it could not connect back
    asks      {"check": 2, "skew_s": 0.1}
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from atoll.core.config.type_checks import shown_text
from atoll.core.errors import ConfigError, one_line
from atoll.engines.network_interfaces import LOOPBACK, is_dialled, reachable_interfaces, refuse_loopback_name
from atoll.engines.socket_transport import receive_record

_VERSION = 2
_LINE_BYTES, _MOST_FACTS, _FACT_LENGTH = 16 << 10, 32, 200
_CONNECT_S, _EXCHANGE_S = 5.0, 30.0
"""Limits of a connection, and of all lines on it. The machine that answers may still have to connect back."""
_ANSWER_S = 600.0
"""How long a machine waits to be asked."""
_TOKEN_BYTES, _WORD_BYTES = 64, 12
_STRANGER_S = 5.0
"""A connection that has sent nothing for so long makes room for the next."""
_ALL = "0.0.0.0"
"""The address of all interfaces."""


@dataclass(frozen=True)
class OtherMachine:
    """What is known of the other machine after a check."""

    address: str  # by which it was reached, or from which it asked
    facts: Mapping[str, str]
    skew_s: float  # its clock minus this one's
    connect_s: float | None  # how long the connection took; None on the machine that answered
    back: str | None  # why it cannot connect here, empty if it can; None if that was not tried


def ask_machine(address: str, facts: Mapping[str, str], listen: str | None) -> OtherMachine:
    """Ask the machine that answers at WORD@HOST:PORT. With `listen`, it connects back to that address of this machine.

    Raises OSError if it cannot be reached, ValueError if something else answers there, and ConfigError if it refuses the word."""
    word, _, address = address.rpartition("@")
    host, _, port = address.rpartition(":")
    began_s = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=_CONNECT_S) as connection:
        connect_s, token = time.monotonic() - began_s, secrets.token_hex(_TOKEN_BYTES // 2)
        connection.settimeout(_EXCHANGE_S)
        with _BackConnection(listen, token) as back:
            sent_s = time.time()
            _send(connection, invited=word, facts=dict(facts), port=back.port, word=token)
            reply = _receive(connection, _EXCHANGE_S)
            if "refused" in reply:
                raise ConfigError(
                    f"{address} answers those alone who know the word that `atoll doctor --listen` has printed there: copy its "
                    f"line `atoll doctor WORD@HOST:PORT`."
                )
            received_s = time.time()
            theirs, their_s, why = _facts(reply), _number(reply, "unix_s"), _text(reply, "back")
            skew_s = their_s - (sent_s + received_s) / 2
            _send(connection, skew_s=-skew_s)
            if back.port and not why and not back.reached():
                why = "another machine has that address: none connected here"
        return OtherMachine(address, theirs, skew_s, connect_s, why if back.port else None)


def answer_machine(listen: str, facts: Mapping[str, str], log: Callable[[str], object], limit_s: float = _ANSWER_S) -> OtherMachine:
    """Listen at this address until a machine has asked with the word that this prints, for at most so many seconds. Raises
    ConfigError if none has."""
    word = secrets.token_hex(_WORD_BYTES // 2)
    with _listener(listen) as listener:
        host, port = listener.getsockname()[:2]
        dialled = [f"atoll doctor {word}@{one}:{port}" for one in (_own_addresses() if host == _ALL else [host])]
        log(f"answering at {host}:{port} for at most {limit_s:.0f} s; on the other machine: {', or '.join(dialled)}")
        deadline_s = time.monotonic() + limit_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            listener.settimeout(left_s)
            try:
                connection, peer = listener.accept()
            except TimeoutError:
                break
            try:
                with connection:
                    return _answer(connection, str(peer[0]), facts, word)
            except (OSError, ValueError) as error:
                log(f"{peer[0]} connected, and is no `atoll doctor` ({shown_text(one_line(error))})")
    raise ConfigError(
        f"no machine asked at {listen} for {limit_s:.0f} s. See that the other machine uses this address, and that no firewall is "
        f"between them."
    )


def _answer(connection: socket.socket, peer: str, facts: Mapping[str, str], word: str) -> OtherMachine:
    connection.settimeout(_EXCHANGE_S / 2)
    asked = _receive(connection, _STRANGER_S)
    if not secrets.compare_digest(_text(asked, "invited").encode(), word.encode()):
        _send(connection, refused=True)
        raise ValueError("it does not know the word")
    theirs, port, token, back = _facts(asked), int(_number(asked, "port")), _text(asked, "word"), ""
    if port:
        try:
            if not 0 < port < 1 << 16:
                raise OSError(f"{port} is no port")
            with socket.create_connection((peer, port), timeout=_CONNECT_S) as other:
                other.sendall(token.encode())
        except OSError as error:
            back = f"{peer}:{port}: {error.strerror or error}"
    _send(connection, facts=dict(facts), unix_s=time.time(), back=back)
    return OtherMachine(peer, theirs, _number(_receive(connection, _EXCHANGE_S / 2), "skew_s"), None, "" if port else None)


class _BackConnection:
    """Listens at an address of this machine for the connection of the other one, which sends a secret token. Without an address it
    does nothing, and its port is 0."""

    def __init__(self, listen: str | None, token: str) -> None:
        self._token, self._arrived = token.encode(), threading.Event()
        self._listener = _listener(listen) if listen is not None else None
        self.port: int = self._listener.getsockname()[1] if self._listener is not None else 0

    def __enter__(self) -> _BackConnection:
        threading.Thread(target=self._accept, name="doctor", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._listener is not None:
            self._listener.close()

    def reached(self) -> bool:
        return self._arrived.wait(_CONNECT_S)

    def _accept(self) -> None:
        with suppress(OSError):
            while self._listener is not None and not self._arrived.is_set():
                connection, _ = self._listener.accept()
                with connection, suppress(OSError):
                    connection.settimeout(_CONNECT_S)
                    if connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL) == self._token:
                        self._arrived.set()


def _listener(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    try:
        if not is_dialled(listen, least_port=0):
            raise ValueError("it is no HOST:PORT")
        listener = socket.create_server((host, int(port)), backlog=8)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--listen {shown_text(listen)}: this machine cannot listen there ({one_line(error)}). Give HOST:PORT with an address "
            f"of this machine that the other reaches, and a free port; port 0 is any."
        ) from error
    with ExitStack() as unless_refused:
        unless_refused.enter_context(listener)
        refuse_loopback_name(f"--listen {listen}", host, listener.getsockname()[0])
        unless_refused.pop_all()
    return listener


def _own_addresses() -> list[str]:
    """The IPv4 addresses at which other machines may reach this one."""
    return [one.address for one in reachable_interfaces() if ":" not in one.address] or [LOOPBACK]


# ------------------------------------------------------------------------------------------------------------- lines of JSON


def _send(connection: socket.socket, **record: Any) -> None:
    connection.sendall(json.dumps({"check": _VERSION, **record}).encode() + b"\n")


def _receive(connection: socket.socket, limit_s: float) -> Mapping[str, Any]:
    record = receive_record(connection, _LINE_BYTES, limit_s)
    if record.get("check") != _VERSION:
        raise ValueError("it is no `atoll doctor` of this version")
    return record


def _facts(record: Mapping[str, Any]) -> dict[str, str]:
    facts = record.get("facts")
    if not isinstance(facts, dict) or len(facts) > _MOST_FACTS:
        raise ValueError("it sent no facts")
    return {_checked(name): _checked(value) for name, value in facts.items()}


def _checked(text: Any) -> str:
    if not isinstance(text, str) or len(text) > _FACT_LENGTH or not text.isprintable():
        raise ValueError("a fact is no short text")
    return text


def _text(record: Mapping[str, Any], name: str) -> str:
    return _checked(record.get(name))


def _number(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e12:
        raise ValueError(f"it sent no {name}")
    return float(value)
