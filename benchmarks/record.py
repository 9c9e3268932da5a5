"""Records: the results of a benchmark, with all that is needed to check them.

    records/<date>_<name>/
        README.md     what was claimed and what came out, the command, the tables
        source.txt    versions, commit, machine and command, with a block for each process that made cells
        cells.jsonl   one line per finished cell
        log.txt       what was said of each, where cells are runs
        plot.png      where there is something to see

A cell is one measurement that takes a while. A cell whose line is there is not made again, so that a benchmark which was stopped
goes on where it was when the same command is given again on the same day, or with `--record` on another.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from os.path import relpath
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError, ConfigError
from atoll.data.prepare import is_prepared, open_prepared
from atoll.runs.folder import source, write_text

RECORDS = Path(__file__).resolve().parent / "records"


class Record:
    """A record's folder. It is made if it is not there yet.

    Args:
        path: the folder.
        command: how the benchmark was called; this process's own arguments if None.
    """

    def __init__(self, path: Path, command: Sequence[str] | None = None) -> None:
        self.path = path
        self.command = shlex.join(command or _command())
        self._started = datetime.now().astimezone().isoformat(timespec="seconds")
        self._is_noted = False
        path.mkdir(parents=True, exist_ok=True)
        self._cells = _read(path / "cells.jsonl")

    @property
    def plot(self) -> Path:
        return self.path / "plot.png"

    @property
    def cells(self) -> list[dict[str, Any]]:
        """All that are finished."""
        return list(self._cells.values())

    def get(self, key: str) -> dict[str, Any] | None:
        """The cell of this key, if it is finished."""
        return self._cells.get(key)

    def add(self, key: str, cell: Mapping[str, Any]) -> dict[str, Any]:
        """Writes down a finished cell, so that it survives whatever happens next."""
        self._note_source()
        line = json.dumps({"key": key, **cell}, allow_nan=False)
        with (self.path / "cells.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._cells[key] = json.loads(line)
        return self._cells[key]

    def say(self, line: str) -> None:
        """Writes a line into the log."""
        with (self.path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def __getitem__(self, key: str) -> dict[str, Any]:
        """The cell of this key, which is finished."""
        return self._cells[key]

    def write(self, title: str, sections: Sequence[str]) -> Path:
        """The record's README.md: title, sections, and how to make it again. Replaces what was there."""
        again = (
            f"## Again\n\n```\n{self.command}\n```\n\n"
            "With `--record` and this folder the command makes what is missing here, and the tables again. Without `--record` it "
            "has a new folder each day, and makes everything anew there. Cells are in `cells.jsonl`, versions and machine in "
            "`source.txt`."
        )
        readme = self.path / "README.md"
        write_text(readme, "\n\n".join([f"# {title}", *sections, again]) + "\n")
        return readme

    def _note_source(self) -> None:
        """Once, with the first cell: who makes tables of what is there has measured nothing."""
        if self._is_noted:
            return
        self._is_noted = True
        lines = {"started": self._started, "command": self.command, **source()}
        with (self.path / "source.txt").open("a", encoding="utf-8") as file:
            file.write("".join(f"{name}: {value}\n" for name, value in lines.items()) + "\n")


def script(main: Callable[[], None]) -> None:
    """Runs a benchmark as a command: an error that a person can mend is one message and exit code 2."""
    try:
        main()
    except AtollError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; give the same command again to go on", file=sys.stderr)
        sys.exit(130)


def default_path(name: str, today: date | None = None) -> Path:
    """Where a benchmark's record goes if nothing else is said.

    >>> default_path("demo_seeds", date(2031, 12, 24)).name
    '2031-12-24_demo_seeds'
    """
    return RECORDS / f"{(today or date.today()).isoformat()}_{name}"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are text and whose others are figures.

    >>> print(markdown_table(["what", "loss"], [["a|b", "2.5"]]))
    | what | loss |
    |---|---:|
    | a\\|b | 2.5 |
    """
    rule = "|" + "---|" * left + "---:|" * (len(headings) - left)
    return "\n".join([_line(headings), rule, *map(_line, rows)])


def replace_between(path: Path, marker: str, text: str) -> bool:
    """Puts the text between `<!-- marker:begin -->` and `<!-- marker:end -->`. False, and nothing done, without such a file.

    Raises:
        ConfigError: the file is there, but the two marks are not.
    """
    if not has_marks(path, marker):
        return False
    begin, end = _marks(marker)
    page = path.read_text("utf-8")
    before, after = page[: page.index(begin) + len(begin)], page[page.index(end) :]
    write_text(path, f"{before}\n\n{text}\n\n{after}")
    return True


def has_marks(path: Path, marker: str) -> bool:
    """Whether there is such a file with the two marks.

    Raises:
        ConfigError: the file is there, but the marks are not, once each and in this order.
    """
    if not path.exists():
        return False
    begin, end = _marks(marker)
    page = path.read_text("utf-8")
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ConfigError(f"{path} needs the line {begin} and after it {end}, once each: the tables go between them. Add them.")
    return True


def _marks(marker: str) -> tuple[str, str]:
    return f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _command() -> list[str]:
    """This process's command, with the script's path as it is from the checkout's root."""
    script, root = Path(sys.argv[0]).resolve(), RECORDS.parents[1]
    shown = script.relative_to(root) if script.is_relative_to(root) else script
    return ["python", str(shown), *sys.argv[1:]]


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The finished cells. A last line without its end was cut off by a kill: it goes, so that the next one does not join it."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        with path.open("r+b") as file:
            file.truncate(len(whole))
    cells: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            cell = json.loads(line)
            cells[cell["key"]] = cell
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"line {number} of {path} is not a cell ({error!r}). Restore it, or remove that line.") from error
    return cells


def fill(page: Path | None, marker: str, sections: Sequence[str], record: Record) -> bool:
    """Puts the sections, all but the commands, between the page's marks, with a link to the record and its plot. False without a
    page."""
    if page is None:
        return False
    place = relpath(record.path, page.parent)
    shown = [demoted(section) for section in sections if not section.startswith("## Commands")]
    plot = [f"![what the record found]({place}/{record.plot.name})"] if record.plot.exists() else []
    return replace_between(page, marker, "\n\n".join([f"[The record]({place}/README.md).", *shown, *plot]))


def demoted(section: str) -> str:
    """A section whose headings are one level lower.

    >>> demoted("## Outcome\\n\\nGood: a ## within a line stays.")
    '### Outcome\\n\\nGood: a ## within a line stays.'
    """
    return "\n".join(f"#{line}" if line.startswith("##") else line for line in section.split("\n"))


_FACTS = ("vocab_size", "tokenizer_digest", "text_bytes", "train", "validation", "domains")


def same_texts(record: Record, folders: Mapping[str, Path]) -> None:
    """Writes down which texts these folders hold, in `text.json`, or makes sure that they are those of the record.

    Raises:
        ConfigError: a folder holds another text, or none where the record knows none either.
    """
    path = record.path / "text.json"
    known: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for name, folder in folders.items():
        if not is_prepared(folder):
            if name in known:  # tables can be made of what is there
                continue
            raise ConfigError(
                f"--{name} {folder}: this is no prepared text. Make one with: atoll data prepare CORPUS --out {folder}"
            )
        meta = open_prepared(folder).meta
        found = {fact: meta[fact] for fact in _FACTS}
        if known.setdefault(name, found) != found:
            raise ConfigError(
                f"--{name} {folder} holds another text than the record {record.path} was made with: {found}, not {known[name]}. "
                f"Give that text, or another --record."
            )
    path.write_text(json.dumps(known, indent=2) + "\n", "utf-8")
