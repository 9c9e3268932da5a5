"""Runs the commands of README and the pages in an environment that has only the wheel of atoll and its extras.

    python -m tools.docs_commands                 # builds the wheel and the environment in a temporary folder
    python -m tools.docs_commands --bin DIR/bin   # takes this environment
    python -m tools.docs_commands --only demo-acco --limit-s 900
    python -m tools.docs_commands --list          # runs nothing: which lines would run, and why the others would not

Runs are cut short: a small model, few rounds, stand-ins for texts and pretrained models. Commands that need another machine or a
download are not run. The report ends with each of them and its reason, and the exit code is 1 if a command has failed.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.environments import ROOT, build_wheel, new_environment

EXTRAS = "plot,hf,noniid,tensorboard,zstd,torchft,ray"
LIMIT_S = 300.0
NOT_RUN = (
    (r"^make |^pip install", "`make` and `pip` set the environment up, which this script does itself"),
    (r"^python benchmarks/", "tests/benchmarks runs the parts of this benchmark"),
    (r"easgd", "tests/test_docs.py runs this page from its code blocks"),
    (
        r"site-[bc]\.json|203\.0\.113\.|10\.8\.0\.1|198\.51\.100\.|^atoll invite .*--revoke",
        "is for two machines: tests/engines/elastic/test_gateway_two_sites.py types such lines on them",
    ),
    (r"--nnodes|engine\.nodes", "is for two machines: tests/engines/test_rank_rendezvous_two_machines.py types it on them"),
    (r"^atoll doctor .*\d", "is for two machines: tests/cli/test_doctor_command.py runs such lines on them"),
    (
        r"^atoll invite .*--rotate",
        "needs the folder of a run that has joiners: tests/cli/test_run_command_elastic.py runs it in one",
    ),
    (r"--join|^atoll invite|engine\.listen=|engine\.address=", "needs another machine, or a run that waits for one"),
    (r"hf:|prepared:data/c4", "downloads a text"),
    (r"files:openwebtext", "has a tokenizer of 50,257 tokens, which only a large text gives"),
    (r"^atoll chaos", "injects faults for minutes; tests/testing/chaos has such runs"),
)
"""Patterns of commands that are not run, and why."""
SIZES = "model.layers=1 model.width=48 model.heads=6 data.limit_bytes=200000 data.seq_len=16 data.eval_batches=2 train.batch_size=8"
STEPS = "train.warm_start_steps=2 keep.evaluate_every=20"
PAPER = "model.head_size=8 data.tokenizer=bytes algorithm.inner_steps=20 optimizer.lr.warmup=2 train.micro_batches=1"
"""Further settings that cut the recipes of the papers' scale short."""
_COUNTS = {"algorithm.inner_steps": 20, "algorithm.warmup": 40}
"""Steps of a demo's round, and of the longest warm-up of a demo's algorithm or learning rate, unless the command sets others."""
PREPARED = (
    "run demo-diloco --seed 3 --out runs/first",
    "run demo-diloco --out runs/second",
    "run demo-async --out runs/async",
)
"""Runs that the pages take for granted."""
NEWEST = re.compile(r"(runs/[\w-]+)/seed0-\.\.\.")
"""The pages' name for the folder of a run that the line before has made."""
SUPPLIED = """
import inspect, json, shutil, zstandard, transformers
from pathlib import Path
from atoll.testing.tiny_pretrained_model import SUMS, save_tiny_model, write_jsonl
text = "\\n".join(path.read_text("utf-8") for path in sorted(Path(inspect.__file__).parent.glob("*.py"))[:60])
for folder in ("books", "logs", "configs"):
    Path(folder).mkdir()
Path("books/one.txt").write_text(text)
lines = "".join(json.dumps({"message": line}) + "\\n" for line in text.splitlines() if line)
Path("logs/one.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
save_tiny_model("models/tiny")
shutil.copytree("models/tiny", "models/gpt-neo-125m")
write_jsonl("sums.jsonl", SUMS)
write_jsonl("alpaca.jsonl", SUMS)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
transformers.LlamaConfig(**sizes).save_pretrained("configs/llama-20m")
"""
"""Writes small stand-ins for the texts, records and models that the pages name."""
INPUTS = {"books", "logs/*.jsonl.zst", "configs/llama-20m", "models/tiny", "models/gpt-neo-125m", "sums.jsonl", "alpaca.jsonl"}
"""What that writes."""


class Outcome(NamedTuple):
    line: str
    status: str  # "ran", "failed" or "not run"
    note: str


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def shell_lines(page: Path) -> list[str]:
    """The command lines of a page. Lines joined by a backslash are one."""
    lines = (line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def short(line: str) -> list[str]:
    """The words of a command line, with settings that cut runs short. Its own settings of sizes stay.

    >>> " ".join(short("atoll run demo-ddp --seed 1  # a comment"))[:60]
    'atoll run demo-ddp --set model.layers=1 --set model.width=48'
    >>> short("atoll report runs/first")
    ['atoll', 'report', 'runs/first']
    >>> short("atoll run finetune --set cluster.islands=2")[-2:]
    ['--set', 'train.steps=20']
    """
    words = shlex.split(line, comments=True)
    first = next((at for at, word in enumerate(words[2:], 2) if re.match(r"(demo|toy|diloco|acco|finetune)\b", word)), None)
    if first is None or words[0] != "atoll" or words[1] not in ("run", "compare", "sweep"):
        return words
    recipe = words[first]
    before = SIZES.split() if not recipe.startswith(("toy", "finetune")) else []
    if "prepared:" in line:  # such a text was cut when it was prepared
        before = [setting for setting in before if not setting.startswith("data.limit_bytes")]
    given = {
        name: [int(count) for found in re.findall(rf"{name}=([\d,]+)", line) for count in found.split(",")] for name in _COUNTS
    }
    inner, warmup = (given[name] or [least] for name, least in _COUNTS.items())
    inner_steps = math.lcm(*inner)  # all cells of a sweep end with a whole round
    # A loop of the user's own has no warm start.
    settings = STEPS.split()["--workload" in words :]
    after = [*settings, f"train.steps={inner_steps * (max(warmup) // inner_steps + 1)}"]
    if recipe == "finetune":
        after = ["train.steps=20"]
    if re.match(r"(diloco|acco)-", recipe):
        after = [*STEPS.split(), *PAPER.split(), "train.steps=20"]
    while first + 1 < len(words) and not words[first + 1].startswith("-"):
        first += 1
    cut, more = ([part for setting in settings for part in ("--set", setting)] for settings in (before, after))
    return [*words[: first + 1], *cut, *words[first + 1 :], *more]


def reason_not_to_run(line: str) -> str | None:
    return next((why for pattern, why in NOT_RUN if re.search(pattern, line)), None)


def command_lines() -> list[str]:
    """The commands of README and the pages, each once and without its comment, after those that prepare runs."""
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    lines = [f"atoll {line}" for line in PREPARED] + [line for page in pages for line in shell_lines(page)]
    return list(dict.fromkeys(line.split("  #")[0].strip() for line in lines))


def problems(lines: list[str]) -> list[str]:
    """What would keep the lines that have no reason not to run from running: another machine, a placeholder, or a file that neither
    this script nor an earlier line makes.

    >>> problems(["atoll run demo-ddp --out runs/ddp", "atoll report runs/ddp", "atoll report runs/dpp", "atoll invite DIR"])
    ['atoll report runs/dpp: no earlier line makes runs/dpp']
    >>> problems(["atoll report FOLDER", "python a.py"])
    ['atoll report FOLDER: has a placeholder, FOLDER', 'python a.py: no earlier line makes a.py']
    """
    made, found = set(INPUTS), []
    for line in (line for line in lines if not reason_not_to_run(line)):
        words = shlex.split(line, comments=True)
        if words[0] not in ("atoll", "python"):
            found.append(f"{line}: {words[0]} is no command of atoll")
        away = re.search(r"\b(192\.0\.2|198\.51\.100|203\.0\.113|10\.\d+\.\d+)\.\d+|\.example\b", line)
        found += [f"{line}: names another machine, {away[0]}"] if away else []
        found += [
            f"{line}: has a placeholder, {name}" for name in re.findall(r"\b(?:DIR|FILE|FOLDER|HOST|PORT|TEXT|STEPS)\b", line)
        ]
        outputs = {words[at + 1] for at, word in enumerate(words[:-1]) if word == "--out"}
        named = re.findall(r"(?<![\w/.])(?:files:)?([\w.-]+/[\w./*-]+\w|(?<=files:)\w+|[\w-]+\.(?:py|jsonl?|toml))(?![\w/(])", line)
        for path in dict.fromkeys(NEWEST.sub(r"\1", path) for path in named if path not in outputs):
            known = (path, *map(str, Path(path).parents[:-1]))
            if not made.intersection(known) and not (path.startswith("examples/") and (ROOT / path).exists()):
                found.append(f"{line}: no earlier line makes {path}")
        made |= outputs
        if words[:2] == ["atoll", "run"] and not outputs:
            made |= {f"runs/{word}" for word in words[2:3] if not word.startswith("-")}
    return found


def stood_in(line: str, folder: Path) -> str:
    """The line that is run in the place of this one, in this folder."""
    if named := NEWEST.search(line):
        newest = max((folder / named[1]).glob("seed0-*"), key=lambda path: path.stat().st_mtime, default=Path(named[0]))
        line = line.replace(named[0], f"{named[1]}/{newest.name}")
    return line


def outcomes(commands: Path, folder: Path, only: str = "", limit_s: float = LIMIT_S) -> Iterator[Outcome]:
    """Runs the commands of all pages in a folder, each once; those that match a pattern only, and those that prepare runs."""
    environment = {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    shutil.copytree(ROOT / "examples", folder / "examples")
    subprocess.run([commands / "python", "-c", SUPPLIED], cwd=folder, env=environment, check=True)
    for at, line in enumerate(command_lines()):
        if at >= len(PREPARED) and not re.search(only, line):
            continue
        if why := reason_not_to_run(line):
            yield Outcome(line, "not run", why)
            continue
        yield _outcome(line, short(stood_in(line, folder)), folder, environment, limit_s)


def _outcome(line: str, words: list[str], folder: Path, environment: dict[str, str], limit_s: float) -> Outcome:
    began_s = time.monotonic()
    given = {"cwd": folder, "env": environment, "text": True}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, **given) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # a run ends its processes, which have sessions of their own
            process.communicate()
            return Outcome(line, "failed", f"did not end within {limit_s:g} s")
    if process.returncode:
        return Outcome(line, "failed", " / ".join((err.strip() or out.strip()).splitlines()[-3:]))
    return Outcome(line, "ran", f"{time.monotonic() - began_s:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, help="the commands of an environment that has the wheel and its extras")
    parser.add_argument("--only", default="", help="a pattern of the command lines to run")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help=f"how long one command may run; default: {LIMIT_S:g} s")
    parser.add_argument("--list", action="store_true", help="run nothing")
    given = parser.parse_args()
    if given.list:
        lines = [line for line in command_lines() if re.search(given.only, line)]
        return _report([Outcome(line, "not run" if (why := reason_not_to_run(line)) else "to run", why or "") for line in lines])
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = given.bin and given.bin.absolute()
        if commands is None:
            commands = new_environment(folder / "environment", [f"{build_wheel(folder)}[{EXTRAS}]"])
        (folder / "work").mkdir()
        for outcome in outcomes(commands, folder / "work", given.only, given.limit_s):
            found.append(outcome)
            if outcome.status != "not run":
                print(f"{outcome.status:<6} {outcome.note:>6}   {outcome.line}", flush=True)
    return _report(found)


def _report(found: list[Outcome]) -> int:
    """Prints each line that was not run with its reason, each failure, and the counts."""
    skipped: dict[str, list[str]] = {}
    for outcome in found:
        if outcome.status == "not run":
            skipped.setdefault(outcome.note, []).append(outcome.line)
    for why, lines in skipped.items():
        print("\n    ".join([f"\nnot run ({len(lines)}): {why}", *lines]))
    failed = [f"\nfailed: {outcome.line}\n    {outcome.note}" for outcome in found if outcome.status == "failed"]
    counts = Counter(outcome.status for outcome in found)
    print(*failed, f"\n{len(found)} command lines: {', '.join(f'{count} {status}' for status, count in counts.items())}", sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
