"""The command `atoll data prepare`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from atoll.core.verified_files import expanded
from atoll.data.prepare import Preparation, find_prepared, prepare
from atoll.telemetry.console_progress import ConsoleSink
from atoll.telemetry.units import human_bytes


def prepare_data(preparation: Preparation, out: Path, *, quiet: bool) -> None:
    out = expanded(out)
    prepared = find_prepared(preparation, out)
    if prepared is not None:
        print(
            f"{out} was prepared by the same command before, and is left as it is. If the text has changed since, remove "
            f"the folder first, or use another --out.",
            file=sys.stderr,
        )
    else:
        with ConsoleSink("prepare", quiet) as sink:
            prepared = prepare(preparation, out, lambda event: sink.emit(replace(event, note=human_bytes(event.done))))
    print(f"{prepared}\nuse it with: --set data.corpus=prepared:{out}")
