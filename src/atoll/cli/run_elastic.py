"""`atoll run --elastic`: islands that come and go. And what it starts: a lighthouse, and islands."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from atoll.cli.commands import interruptible, run_of, show_result, sinks_of
from atoll.core.config.json_records import from_json
from atoll.core.errors import CheckpointError, ConfigError
from atoll.engines.driver import is_finished
from atoll.engines.elastic.island import Interpose
from atoll.engines.elastic.join import take_part
from atoll.engines.elastic.launch import create_elastic, keep_going, place_again, refuse_strangers
from atoll.engines.elastic.recovery import NoState
from atoll.engines.elastic.rendezvous import Rendezvous
from atoll.engines.elastic.spec import Elastic, JoinInfo, check_address, read_elastic
from atoll.engines.elastic.supervisor import STATELESS
from atoll.engines.processes.rank_log import leave_at_once
from atoll.runs.folder import RunFolder, default_path

if TYPE_CHECKING:
    from atoll.testing.chaos.faults import FaultScript

START_LIMIT_S = 3600.0


def carry_out_elastic(
    name: str | None,
    settings: Sequence[str],
    seed: int | None,
    out: Path | None,
    resume: Path | None,
    as_json: bool,
    quiet: bool,
    how: Mapping[str, Any],
    chaos: Path | None = None,
) -> None:
    """Carries out a run by islands that come and go; breaks it on purpose, where there is a script for that."""
    given = {key: value for key, value in how.items() if value is not None}
    script = _script(chaos)
    if resume is not None:
        folder = resume.expanduser()
        if out is not None or name is not None or settings or seed is not None:
            raise ConfigError("a recipe, --out, --set or --seed with --resume: a run goes on as it began. Leave them out.")
        before = read_elastic(folder)
        if before is None:
            raise ConfigError(
                f"--elastic with --resume {folder}: this run is none of islands that come and go. Leave out --elastic."
            )
        place = place_again(before, given)
        refuse_strangers(script, place, from_json(RunFolder.open(folder).run_json))
        RunFolder.open(folder).resumed(sys.argv)
    else:
        if name is None:
            raise ConfigError("no recipe was given. `atoll recipes` lists them. Or go on with a run: --resume DIR.")
        run, place = run_of(name, settings, seed), Elastic(**given)
        refuse_strangers(script, place, run)
        folder = create_elastic(run, place, (out or default_path(run.recipe, run.seed)).expanduser(), sys.argv)
        if not quiet:
            print(f"folder: {folder}", file=sys.stderr)
    if not is_finished(RunFolder.open(folder)):
        mine = from_json(RunFolder.open(folder).run_json)
        with interruptible(folder), _terminated_like_interrupted():
            sinks, say = sinks_of(mine.recipe, mine, quiet=quiet), _say_nothing if quiet else _say
            keep_going(folder, place, say=say, sinks=sinks, chaos=script)
    if script is not None:
        from atoll.testing.chaos.reports import elastic_report, report_text

        print(report_text(elastic_report(folder)), file=sys.stderr)
    show_result(folder, as_json=as_json)


def _script(path: Path | None) -> FaultScript | None:
    from atoll.testing.chaos.faults import FaultScript

    return FaultScript.read(path) if path is not None else None


def _faults(path: Path | None) -> Interpose | None:
    if path is None:
        return None
    from atoll.testing.chaos.update_faults import interpose_update_faults

    return interpose_update_faults(path)


class _terminated_like_interrupted:  # noqa: N801
    """Whoever is asked to end stops what it has started."""

    def __enter__(self) -> None:
        def end(number: int, frame: object) -> NoReturn:
            raise KeyboardInterrupt

        self._before = signal.signal(signal.SIGTERM, end)

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGTERM, self._before)


def be_joiner(address: str, others: Sequence[str], devices: int | None) -> None:
    """Be one more island of the run at this address, with so many devices."""
    if others:
        raise ConfigError(f"{', '.join(others)} with --join: what the run is, an island is told there. Leave out all else.")
    check_address(address)
    # It may be started after this one; who mistyped the address should not wonder how long that is waited for.
    _say(f"looking for the run at {address}, for at most {START_LIMIT_S:.0f} s; Ctrl-C ends it before")
    # Two containers on one machine's network may have the same name and the same process id.
    be_island(address, f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}", None, devices=devices)


def be_island(address: str, name: str, folder: Path | None, chaos: Path | None = None, devices: int | None = None) -> None:
    """Be one island of the run at this address."""
    if folder is not None:
        _end_with_whoever_started_this()
    os.environ.setdefault("RUST_LOG", "warn")  # torchft tells of every meeting
    try:
        limit_s = START_LIMIT_S if folder is None else 60.0
        take_part(address, name, folder=folder, say=_say, start_limit_s=limit_s, interpose=_faults(chaos), devices=devices)
    except NoState as error:  # others may have what this one could not read
        leave_at_once(error, code=STATELESS)
    except CheckpointError as error:  # in the middle of the run: a death like any other
        leave_at_once(error, code=1)
    except BaseException as error:
        leave_at_once(error)
    sys.stdout.flush()
    os._exit(0)  # threads of the communication may still wait for somebody


def be_harbour(invitation: Path, address: str) -> NoReturn:
    """Keep the lighthouse and the roll of a run, until this process is ended."""
    _end_with_whoever_started_this()
    invited = JoinInfo.from_text(invitation.read_text("utf-8"))
    host, _, port = address.rpartition(":")
    lighthouse_port = int(invited.lighthouse.rpartition(":")[2])
    try:
        place = invited.place
        kept = Rendezvous(host, int(port), lighthouse_port, invited.to_text(), join_limit_s=place.limit_s, silent_s=place.silent_s)
    except BaseException as error:
        leave_at_once(error)
    try:
        while True:
            signal.pause()
    finally:
        kept.close()


def _end_with_whoever_started_this() -> None:
    """Whoever started this process holds the other end of its input."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="orphan", daemon=True).start()


def _say(text: str) -> None:
    with suppress(OSError):  # a log that cannot be written ends nothing
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _say_nothing(text: str) -> None:
    pass
