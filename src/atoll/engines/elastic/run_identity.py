"""Who belongs to an elastic run: its id, its certificate authority, and the join files that admit other machines.

`secrets/identity.json` in the run's folder holds the keys: of the authority, which signs certificates of this run alone, and of the
machine with the folder. Only the user who owns the folder can read it, and no command line carries a key. A join file holds a
certificate and a key of its own; its id can be revoked. A machine that joins needs no library for certificates but Python's ssl.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import ssl
import stat
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError
from atoll.core.optional_imports import require
from atoll.core.verified_files import read_record, sealed, sync_folder, unsealed
from atoll.engines.network_interfaces import is_dialled

MACHINE = "machine"
"""The identity of the machine with the run's folder. Those of join files are random."""
_JOIN_FORMAT = 3
_JOIN_LIMIT_BYTES = 1 << 16
_RUN_ID = re.compile(r"run-[0-9a-f]{16}")
IDENTITY = re.compile(r"[0-9a-f]{12}")
"""Of a join file."""
_VALID = timedelta(days=3650)
_SKEW = timedelta(days=1)
"""Clocks of two machines may differ by so much."""


def run_id_of(folder: Path) -> str:
    """The id of the run in this folder, which the first call draws. If its file was lost, that of the folder's keys, which join
    files have, too."""
    path = folder / "run_id"
    if not path.exists():
        has_keys = os.path.lexists(_path(folder))
        run_id = RunSecrets._read(folder).credentials.run_id if has_keys else f"run-{secrets.token_hex(8)}"
        with suppress(FileExistsError):  # another process was faster
            _create(path, f"{run_id}\n", 0o644)
    try:
        text = path.read_text("utf-8", errors="replace").strip()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}. Restore it from a copy.") from error
    if not _RUN_ID.fullmatch(text):
        raise ConfigError(f"{path} holds {text[:40]!r}, and a run's id looks like run-0123456789abcdef. Restore it from a copy.")
    return text


def _create(path: Path, text: str, mode: int) -> None:
    """Create a file with all of its text, or none. Raises FileExistsError if there is one already."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        _write(unfinished, text, mode)
        os.link(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)


def _write(path: Path, text: str, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with open(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)  # whatever the umask is
        file.write(text.encode())
        file.flush()
        os.fsync(descriptor)


# ------------------------------------------------------------------------------------------------------------ certificates


@dataclass(frozen=True)
class Credentials:
    """What one machine proves its membership with, and recognizes the others by. All but the ids is PEM."""

    run_id: str
    identity: str
    authority: str  # the certificate that signed all others of the run
    certificate: str
    key: str = field(repr=False)

    def server_context(self) -> ssl.SSLContext:
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # each connection shows its certificate: a revoked one cannot resume a session
        return context

    def client_context(self) -> ssl.SSLContext:
        return _client_context(self)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # One direction of a stream may end before the other. What passes through streams states its length itself.
        context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority)
        with _in_memory(self.certificate + self.key) as path:
            context.load_cert_chain(path)
        return context

    @property
    def fingerprint(self) -> str:
        """Of the authority: the users of two machines can compare it by another channel."""
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.authority)).hexdigest()


@lru_cache(maxsize=4)
def _client_context(credentials: Credentials) -> ssl.SSLContext:
    return credentials._context(ssl.PROTOCOL_TLS_CLIENT)


@contextmanager
def _in_memory(text: str) -> Iterator[str]:
    """The path of a file that exists in memory only, since Python's ssl reads keys from files."""
    descriptor = os.memfd_create("atoll", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _library(module: str) -> Any:
    return require(f"cryptography.{module}", extra="torchft", purpose="elastic runs across machines")


def _new_key() -> tuple[Any, str]:
    """A private key on the curve P-256, and its PEM."""
    ec, serial = _library("hazmat.primitives.asymmetric.ec"), _library("hazmat.primitives.serialization")
    key = ec.generate_private_key(ec.SECP256R1())
    return key, key.private_bytes(serial.Encoding.PEM, serial.PrivateFormat.PKCS8, serial.NoEncryption()).decode()


def server_name(run_id: str, identity: str = "") -> str:
    """Under which a gateway is known: the run's own, or the standby of the machine with this identity."""
    return f"{identity}.{run_id}" if identity else run_id


def _sign(run_id: str, name: str, key: Any, signer: Any, authority: Any = None, *, serves: str = "") -> str:
    """The certificate of this key, in PEM. Without an authority it is one. Only a certificate that `serves` under a server name
    identifies a gateway to its clients, and under no other name: a machine with a join file is not taken for the run's gateway."""
    x509, oid = _library("x509"), _library("x509.oid")
    names = {oid.NameOID.ORGANIZATION_NAME: run_id, oid.NameOID.COMMON_NAME: name}
    own = x509.Name([x509.NameAttribute(kind, text) for kind, text in names.items()])
    now, is_authority = datetime.now(UTC), authority is None
    builder = (
        x509.CertificateBuilder(own if is_authority else authority.subject, own, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not is_authority,
                key_cert_sign=is_authority,
                crl_sign=is_authority,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
    )
    if not is_authority:
        usages = [oid.ExtendedKeyUsageOID.CLIENT_AUTH, *([oid.ExtendedKeyUsageOID.SERVER_AUTH] if serves else [])]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=True)
    if serves:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(serves)]), critical=False)
    signed = builder.sign(signer, _library("hazmat.primitives.hashes").SHA256())
    pem: bytes = signed.public_bytes(_library("hazmat.primitives.serialization").Encoding.PEM)
    return pem.decode()


# ----------------------------------------------------------------------------------------------------------------- secrets


@dataclass(frozen=True)
class RunSecrets:
    """The secrets of a run, as they lie in its folder."""

    credentials: Credentials  # of the machine with the folder
    authority_key: str = field(repr=False)
    invited: Mapping[str, str] = field(default_factory=dict)  # ids of join files, and when they were written
    revoked: tuple[str, ...] = ()
    standbys: Mapping[str, str] = field(default_factory=dict)  # ids of join files that allow standing by, and their addresses

    @staticmethod
    def create(folder: Path) -> RunSecrets:
        """Those of the run in this folder; new ones if there are none."""
        with _locked(folder):
            return RunSecrets._stored(folder)

    @staticmethod
    def read(folder: Path) -> RunSecrets:
        """Raises ConfigError if there are none, or they cannot be read, or are of another run."""
        found, path = RunSecrets._read(folder), _path(folder)
        if found.credentials.run_id != run_id_of(folder):
            raise ConfigError(
                f"{path} is of {found.credentials.run_id}, and {folder / 'run_id'} holds {run_id_of(folder)}. Remove run_id if "
                f"join files of {found.credentials.run_id} are to stay valid: the next start takes the id from {path.name}. Else "
                f"remove {path.name}, and every join file has to be written anew."
            )
        return found

    @staticmethod
    def _read(folder: Path) -> RunSecrets:
        """Those that lie in this folder, whatever its run's id is."""
        path = _path(folder)
        with suppress(OSError):  # which the reading explains
            _refuse_public(path)
            _warn_of_readers(path, stat.S_IMODE(path.stat().st_mode) & 0o077)
        try:
            record = read_record(path)
            credentials = Credentials(**record.pop("credentials"))
            found = RunSecrets(credentials, **{**record, "revoked": tuple(record["revoked"])})
            if not all(isinstance(one, str) for one in (*vars(credentials).values(), *found.revoked)):
                raise ValueError("its credentials and the ids of join files are texts")
            if not _RUN_ID.fullmatch(credentials.run_id):
                raise ValueError("its run id is none")
        except FileNotFoundError as error:
            raise ConfigError(f"{folder} has no {path.relative_to(folder)}: no machine has been admitted to it yet.") from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{path} cannot be read ({type(error).__name__}: {error}). Restore it from a copy, or remove it: the next start "
                f"of the run then writes a new one, and every join file has to be written anew."
            ) from error
        return found

    @staticmethod
    def invite(folder: Path, addresses: tuple[str, ...], standby: str = "", run: str = "") -> JoinFile:
        """A new join file for these addresses of the run, and for those of its standbys. With `standby`, an address, it allows its
        machine to run a standby rendezvous there. `run` is the digest of the Run that its machine is to train."""
        with _locked(folder):
            stored, identity = RunSecrets._stored(folder), secrets.token_hex(6)
            key, pem = _new_key()
            run_id = stored.credentials.run_id
            certificate = _sign(run_id, identity, key, *stored._signer(), serves=server_name(run_id, identity) if standby else "")
            now = datetime.now(UTC).isoformat(timespec="seconds")
            standbys = {**stored.standbys, **({identity: standby} if standby else {})}
            replace(stored, invited={**stored.invited, identity: now}, standbys=standbys)._save(folder)
        credentials = replace(stored.credentials, identity=identity, certificate=certificate, key=pem)
        others = (f"{one}@{where}" for one, where in stored.standbys.items() if one not in stored.revoked)
        return JoinFile(credentials, (*addresses, *others), version("atoll"), standby, run)

    @staticmethod
    def revoke(folder: Path, identity: str) -> None:
        """Admit the join file of this id no more."""
        with _locked(folder):
            stored = RunSecrets._stored(folder)
            if identity not in stored.invited:
                known = ", ".join(f"{one} (of {at})" for one, at in stored.invited.items()) or "none"
                raise ConfigError(f"--revoke {identity}: no join file of this run has that id. The ids are: {known}.")
            replace(stored, revoked=tuple(dict.fromkeys([*stored.revoked, identity])))._save(folder)

    @staticmethod
    def rotate(folder: Path) -> None:
        """Replace the authority: no join file that was written so far is admitted any more."""
        with _locked(folder):
            RunSecrets._new(run_id_of(folder))._save(folder)

    @staticmethod
    def _stored(folder: Path) -> RunSecrets:
        if not os.path.lexists(_path(folder)):
            RunSecrets._new(run_id_of(folder))._save(folder)
        return RunSecrets.read(folder)

    @staticmethod
    def _new(run_id: str) -> RunSecrets:
        authority_key, authority_pem = _new_key()
        authority = _sign(run_id, "authority", authority_key, authority_key)
        key, pem = _new_key()
        signer = authority_key, _library("x509").load_pem_x509_certificate(authority.encode())
        certificate = _sign(run_id, MACHINE, key, *signer, serves=server_name(run_id))
        return RunSecrets(Credentials(run_id, MACHINE, authority, certificate, pem), authority_pem)

    def _signer(self) -> tuple[Any, Any]:
        """The authority's private key and its certificate."""
        key = _library("hazmat.primitives.serialization").load_pem_private_key(self.authority_key.encode(), None)
        return key, _library("x509").load_pem_x509_certificate(self.credentials.authority.encode())

    def _save(self, folder: Path) -> None:
        path = _path(folder)
        unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
        try:
            _write(unfinished, sealed(asdict(self)), 0o600)
            os.replace(unfinished, path)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}. Make room or get access there.") from error
        finally:
            unfinished.unlink(missing_ok=True)
        sync_folder(path.parent)


@lru_cache
def _refuse_public(path: Path) -> None:
    """Refuse keys that all users of the machine have access to, before this process has read them. A run that has begun goes on."""
    if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o007:
        raise ConfigError(f"{path} can be read by other users (mode {mode:o}), and it holds keys: chmod 600 {path}.")


@lru_cache
def _warn_of_readers(path: Path, readers: int) -> None:
    """Warn once. A volume may give its group access to all files whenever it is mounted, as with Kubernetes' fsGroup."""
    if readers:
        who = "other users have" if readers & 0o007 else "its group has"
        warnings.warn(f"{path} holds keys, and {who} access to it: chmod 600 {path}.", stacklevel=2)


def _path(folder: Path) -> Path:
    return folder / "secrets" / "identity.json"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Creates the folder of the secrets, and keeps other processes from changing them."""
    place = _path(folder).parent
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"cannot use {place}: {error.strerror or error}. It must be a folder of yours.") from error
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
            os.fchmod(descriptor, 0o700)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------------- join files


@dataclass(frozen=True)
class JoinFile:
    """Admits the machine that has it to a run: addresses of gateways, and credentials of its own. The address of a standby has the
    form ID@HOST:PORT."""

    credentials: Credentials
    addresses: tuple[str, ...]
    atoll: str  # the version that wrote it
    standby: str = ""  # where other machines dial a standby rendezvous of this machine, which the file allows
    run: str = ""  # the digest of the Run: what the run's rendezvous publishes, every member can overwrite

    def write(self, path: Path) -> None:
        """Create this file, which only its owner can read."""
        record: dict[str, Any] = {"format": _JOIN_FORMAT, "atoll": self.atoll, "fingerprint": self.credentials.fingerprint}
        record |= {"addresses": self.addresses, "standby": self.standby, "run": self.run}
        text = sealed({**record, "credentials": asdict(self.credentials)})
        try:
            _create(path, text, 0o600)
        except FileExistsError as error:
            raise ConfigError(f"--out {path} exists already. Give a new file.") from error
        except OSError as error:
            raise ConfigError(
                f"--out {path} cannot be written: {error.strerror or error}. Give a file in another folder."
            ) from error

    @staticmethod
    def read(path: Path) -> JoinFile:
        """Raises ConfigError if this is no join file, other users can read it, or another version of atoll wrote it."""
        try:
            with open(path, "rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                text = file.read(_JOIN_LIMIT_BYTES)
        except OSError as error:
            raise ConfigError(
                f"--join {path} cannot be read: {error.strerror or error}. Give HOST:PORT, or a join file."
            ) from error
        if mode & 0o077:
            raise ConfigError(f"--join {path} can be read by other users (mode {mode:o}), and it holds a key: chmod 600 {path}.")
        try:
            record = unsealed(text)
            if record["atoll"] != version("atoll"):
                raise ConfigError(
                    f"--join {path} is of atoll {record['atoll']}, and this is atoll {version('atoll')}. All islands of a run need "
                    f"the same version: install {record['atoll']} here."
                )
            if record["format"] != _JOIN_FORMAT:
                raise ConfigError(
                    f"--join {path} has format {record['format']}, and this atoll reads format {_JOIN_FORMAT}, which has the "
                    f"digest of the Run. Write a new one with `atoll invite DIR` on the machine that has the run's folder."
                )
            addresses, given = tuple(record["addresses"]), record["credentials"]
            standby, run = record["standby"], record["run"]
            if not addresses or not all(isinstance(one, str) for one in (*addresses, standby, run, *given.values())):
                raise ValueError("its addresses and credentials are texts")
            for one in (*(address.rpartition("@")[2] for address in addresses), *filter(None, [standby])):
                if not is_dialled(one):
                    raise ValueError(f"{one[:80]!r} is not HOST:PORT")
            credentials = Credentials(**given)
            if credentials.fingerprint != record["fingerprint"] or not _RUN_ID.fullmatch(credentials.run_id):
                raise ValueError("its fingerprint is not that of its certificate, or its run id is none")
            credentials.client_context()
        except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError) as error:
            raise ConfigError(
                f"--join {path} is no join file, or damaged ({type(error).__name__}: {error}). Write one with `atoll invite DIR` "
                f"on the machine that has the run's folder, and copy it."
            ) from error
        return JoinFile(credentials, addresses, record["atoll"], standby, run)
