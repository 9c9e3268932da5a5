"""Records: the results of a benchmark, with everything a reader needs to check them. And what all scripts share: options, tables.

    records/<date>_<name>/
        README.md     results in words and tables, and the command that produced them
        source.txt    versions, commit, git's hashes of src and benchmarks, machine and command; a block for each measuring process
        cells.jsonl   one line per finished cell
        log.txt       the result of each cell, where cells are runs
        plot.png      a plot, where there is one

A cell is one measurement. A script skips a cell whose line exists. So a stopped benchmark continues if the user repeats the command
on the same day, or later with `--record`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime
from hashlib import blake2b
from os.path import relpath
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError, ConfigError
from atoll.core.verified_files import write_text
from atoll.data.prepare import is_prepared, open_prepared
from atoll.data.token_store import Ids
from atoll.runs.folder import source

RECORDS = Path(__file__).resolve().parent / "records"


class Record:
    """A record's folder.

    Args:
        path: the folder, which is created with the first file in it.
        command: the benchmark's command line; None: that of this process.
    """

    def __init__(self, path: Path, command: Sequence[str] | None = None) -> None:
        self.path = path
        self.command = shlex.join(command or _command())
        self._started = datetime.now().astimezone().isoformat(timespec="seconds")
        self._source_written = False
        self._cells = _read(path / "cells.jsonl")
        self.texts: dict[str, str] = {}
        """The identities of prepared texts by their folders, from `check_texts`. Keys of cells have them, not the folders."""

    @property
    def plot(self) -> Path:
        return self.path / "plot.png"

    @property
    def cells(self) -> list[dict[str, Any]]:
        """All finished cells."""
        return list(self._cells.values())

    def get(self, key: str) -> dict[str, Any] | None:
        """The cell with this key; None if it is not finished."""
        return self._cells.get(key)

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._cells[key]

    def add(self, key: str, cell: Mapping[str, Any]) -> dict[str, Any]:
        """Appends a finished cell and syncs it to disk."""
        self._write_source()
        return self.copy({"key": key, **cell})

    def copy(self, cell: Mapping[str, Any]) -> dict[str, Any]:
        """Appends a cell that another record has: this process has not measured it."""
        key, line = cell["key"], json.dumps(cell, allow_nan=False)
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "cells.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._cells[key] = json.loads(line)
        return self._cells[key]

    def log(self, line: str) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    @property
    def measured_with(self) -> list[str]:
        """The commands that measured cells, from `source.txt`; this process's if there are none."""
        source = self.path / "source.txt"
        lines = source.read_text("utf-8").splitlines() if source.exists() else []
        commands = [line.removeprefix("command: ") for line in lines if line.startswith("command: ")]
        return list(dict.fromkeys(commands)) or [self.command]

    def write(self, title: str, sections: Sequence[str]) -> Path:
        """Writes README.md: title, sections, and how to reproduce them."""
        self.path.mkdir(parents=True, exist_ok=True)
        readme = self.path / "README.md"
        write_text(readme, "\n\n".join([f"# {title}", *sections, self.reproduced]) + "\n")
        return readme

    @property
    def reproduced(self) -> str:
        """The last section of README.md. It depends on `source.txt` alone, so that writing the tables again does not change it."""
        commands = "\n".join(self.measured_with)
        return (
            f"## How to reproduce\n\n```\n{commands}\n```\n\n"
            "These commands measured the cells, at the commits in `source.txt`; a later commit may name an option otherwise. With "
            "`--record` and this folder a command measures only missing cells, and writes the tables again. Without `--record` it "
            "writes a new record in a folder with today's date. Cells are in `cells.jsonl`, versions and machine in `source.txt`."
        )

    def publish(
        self,
        title: str,
        sections: Sequence[str],
        *,
        plot: str = "",
        plots: Mapping[str, str] | None = None,
        docs: tuple[Path | None, str] = (None, ""),
    ) -> None:
        """Writes README.md, fills a docs page, and prints the sections.

        Args:
            title: of README.md.
            sections: of README.md.
            plot: what the plot shows, for the image's alternative text; empty: no plot.
            plots: the same by file, of a record with several plots.
            docs: a page and the name of its markers; None: no page.
        """
        shown = {self.plot.name: plot} if plot else dict(plots or {})
        readme = self.write(title, [*sections, *(f"![{caption}]({name})" for name, caption in shown.items())])
        fill(*docs, sections, self, plots)
        print("\n\n".join(sections))
        print(f"\nrecord: {readme}")

    def _write_source(self) -> None:
        """Once, with the first cell: a process that only writes tables has measured nothing."""
        if self._source_written:
            return
        self._source_written = True
        self.path.mkdir(parents=True, exist_ok=True)
        lines = {"started": self._started, "command": self.command, **source()}
        with (self.path / "source.txt").open("a", encoding="utf-8") as file:
            file.write("".join(f"{name}: {value}\n" for name, value in lines.items()) + "\n")


def _command() -> list[str]:
    """This process's command, with the script's path relative to the checkout's root."""
    script, root = Path(sys.argv[0]).resolve(), RECORDS.parents[1]
    shown = script.relative_to(root) if script.is_relative_to(root) else script
    return ["python", str(shown), *sys.argv[1:]]


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The finished cells. A kill may have cut off the last line: it is removed, so that the next cell starts a line of its own."""
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


# ---------------------------------------------------------------------------------------------------------------- the command


def script(main: Callable[[], None]) -> None:
    """Runs a benchmark as a command: an error that the user can fix is one message and exit code 2."""
    try:
        main()
    except AtollError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; repeat the command to continue", file=sys.stderr)
        sys.exit(130)


def benchmark_parser(
    doc: str | None, name: str, *, page: str = "", quick: bool = False, dry: bool = False
) -> argparse.ArgumentParser:
    """The options that benchmarks share.

    Args:
        doc: the script's docstring, whose first line describes it.
        name: of the record.
        page: the docs page with markers for the tables; empty: none, and no `--docs`.
        quick: whether there is a `--quick`.
        dry: whether there is a `--dry-run`.

    >>> vars(benchmark_parser("Measures something.", "hub_step", quick=True).parse_args([]))
    {'record': None, 'quiet': False, 'quick': False}
    """
    first = (doc or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--record", type=Path, help=f"the record's folder; None: records/<today>_{name}")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    if quick:
        parser.add_argument("--quick", action="store_true", help="smoke test at small sizes; its figures mean nothing")
    if dry:
        parser.add_argument("--dry-run", action="store_true", help="list the missing cells in the order in which they would run")
    if page:
        parser.add_argument("--docs", type=Path, help=f"write the tables between the markers of this page, such as {page}")
    return parser


def open_record(options: argparse.Namespace, name: str) -> Record:
    """The record that `--record` names, or today's. Records of `--quick` have a name of their own."""
    return Record(options.record or default_path(name + ("_quick" if getattr(options, "quick", False) else "")))


def default_path(name: str, today: date | None = None) -> Path:
    """The folder of a record without `--record`.

    >>> default_path("demo_seeds", date(2031, 12, 24)).name
    '2031-12-24_demo_seeds'
    """
    return RECORDS / f"{(today or date.today()).isoformat()}_{name}"


def missing_text(missing: Sequence[str]) -> str:
    """What `--dry-run` prints.

    >>> print(missing_text(["DDP", "ACCO"]))
    DDP
    ACCO
    2 cells are missing.
    """
    return "\n".join([*missing, f"{len(missing)} cells are missing."])


# ------------------------------------------------------------------------------------------------------------------- Markdown


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are text and whose others are figures.

    >>> print(markdown_table(["row", "loss"], [["a|b", "2.5"]]))
    | row | loss |
    |---|---:|
    | a\\|b | 2.5 |
    """
    rule = "|" + "---|" * left + "---:|" * (len(headings) - left)
    return "\n".join([_line(headings), rule, *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def holds_text(holds: bool) -> str:
    """The verdict on a claim that one figure decides."""
    return "**holds here**" if holds else "**does not hold here**"


def replace_between(path: Path, marker: str, text: str) -> bool:
    """Puts the text between `<!-- marker:begin -->` and `<!-- marker:end -->`. False if there is no such file.

    Raises:
        ConfigError: the file exists, but the two markers do not.
    """
    if not has_markers(path, marker):
        return False
    begin, end = _markers(marker)
    page = path.read_text("utf-8")
    before, after = page[: page.index(begin) + len(begin)], page[page.index(end) :]
    write_text(path, f"{before}\n\n{text}\n\n{after}")
    return True


def has_markers(path: Path, marker: str) -> bool:
    """Whether there is such a file with the two markers.

    Raises:
        ConfigError: the file exists, but does not have the markers once each and in this order.
    """
    if not path.exists():
        return False
    begin, end = _markers(marker)
    page = path.read_text("utf-8")
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ConfigError(f"{path} needs the line {begin} and after it {end}, once each: the tables go between them. Add them.")
    return True


def _markers(marker: str) -> tuple[str, str]:
    return f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"


def fill(page: Path | None, marker: str, sections: Sequence[str], record: Record, plots: Mapping[str, str] | None = None) -> bool:
    """Puts all sections but the commands between the page's markers, with links to the record and its plots. False without a
    page."""
    if page is None:
        return False
    folder = relpath(record.path, page.parent)
    shown = [demoted(section) for section in sections if not section.startswith("## Commands")]
    every = plots if plots is not None else {record.plot.name: "the record's plot"} if record.plot.exists() else {}
    plot = [f"![{caption}]({folder}/{name})" for name, caption in every.items()]
    return replace_between(page, marker, "\n\n".join([f"[The record]({folder}/README.md).", *shown, *plot]))


def demoted(section: str) -> str:
    """A section whose headings are one level lower.

    >>> demoted("## Outcome\\n\\nGood: a ## within a line stays.")
    '### Outcome\\n\\nGood: a ## within a line stays.'
    """
    return "\n".join(f"#{line}" if line.startswith("##") else line for line in section.split("\n"))


# -------------------------------------------------------------------------------------------------------------- prepared text

_FACTS = ("vocab_size", "tokenizer_digest", "text_bytes", "train", "validation")


def check_texts(record: Record, folders: Mapping[str, Path], *, needed: bool = True) -> None:
    """Compares the prepared texts with those in the record's `text.json`, adds texts that are not in it, and gives the record
    their identities. A text of an older record, which has no digests of its tokens, is compared by the other facts and stays as
    it is. A text that is not `needed`, to list cells alone, may be missing.

    Raises:
        ConfigError: a folder holds another text; or it holds no text, and neither does the record.
    """
    path = record.path / "text.json"
    known: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for name, folder in folders.items():
        if not is_prepared(folder):
            if name in known:  # enough to write the tables
                record.texts[str(folder)] = text_identity(known[name])
                continue
            if not needed:
                continue
            raise ConfigError(
                f"--{name} {folder}: this is no prepared text. Make one with: atoll data prepare CORPUS --out {folder}"
            )
        text = open_prepared(folder)
        found = {fact: text.meta[fact] for fact in _FACTS}
        sides = {"train": text.train, "validation": text.validation}
        found["token_digests"] = {side: tokens_digest(tokens.ids) for side, tokens in sides.items()}
        compared = {fact: value for fact, value in known.setdefault(name, found).items() if fact != "domains"}
        if any(found.get(fact) != value for fact, value in compared.items()):
            raise ConfigError(
                f"--{name} {folder} holds another text than the record {record.path} was made with: {found}, not {known[name]}. "
                f"Give that text, or another --record."
            )
        record.texts[str(folder)] = text_identity(known[name])
    if known:
        record.path.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known, indent=2) + "\n", "utf-8")


def text_identity(facts: Mapping[str, Any]) -> str:
    """The digests of a text's tokens; in an older record, which has none, a digest of the facts that it has."""
    if "token_digests" in facts:
        return "-".join(facts["token_digests"][side] for side in ("train", "validation"))
    return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def tokens_digest(ids: Ids) -> str:
    """BLAKE2b of all token ids, in the file's order."""
    return blake2b(ids.data, digest_size=16).hexdigest()
