"""What a process of a run writes down for itself, one log per rank in the run's folder, and what it tells others when it ends."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NoReturn

from torch.distributed.distributed_c10d import Store

from atoll.core.errors import AtollError, ExchangeFailed
from atoll.engines.liveness import FailureAttribution

MISSED_ANOTHER = 3
"""The exit code of a process that ends because another is missing, or is not what it should be."""


def log_of(folder: Path, rank: int) -> Path:
    """What a rank writes down, and all that it prints unless it is the first."""
    return folder / "logs" / f"rank-{rank}.log"


class RankLog:
    """The log of one rank."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=self._file, flush=True)


@contextmanager
def own_log(folder: Path, rank: int) -> Iterator[RankLog]:
    """Each rank has a log of its own; the first alone has the console as well. A rank that fails says why and is gone at once:
    its communication may hang, and must not keep it."""
    path = log_of(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        console = {number: os.dup(number) for number in (1, 2)} if rank != 0 else {}
        for number in console:
            os.dup2(file.fileno(), number)
        try:
            yield RankLog(file)
        except BaseException as error:
            leave_at_once(error, file)
        finally:
            for number, before in console.items():
                sys.stdout.flush()
                os.dup2(before, number)
                os.close(before)


@contextmanager
def telling_why(store: Store, rank: int, size: int) -> Iterator[None]:
    """Who ends for a reason of its own says so where others can read it. Those who miss it then know why it went."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, ExchangeFailed):
            text = str(error) if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
            FailureAttribution(store, rank, range(size)).record_exit_reason(" ".join(text.split()))
        raise


def leave_at_once(error: BaseException, log: IO[str] | None = None, code: int | None = None) -> NoReturn:
    """End this process, with the error in its log and on its console, and with this exit code; none: the usual one."""
    known, interrupted = isinstance(error, AtollError), isinstance(error, KeyboardInterrupt)
    text = "interrupted" if interrupted else f"error: {' '.join(str(error).split())}"
    for file in [file for file in (log, None if interrupted else sys.stderr) if file is not None]:
        if not (known or interrupted):
            traceback.print_exception(error, file=file)
        print(text, file=file, flush=True)
    sys.stdout.flush()
    usual = 130 if interrupted else MISSED_ANOTHER if isinstance(error, ExchangeFailed) else 2 if known else 1
    os._exit(usual if code is None else code)
