"""A fuzzer: whatever happens to a file of a run, each command ends with an AtollError of bounded length, or with the result of the
undamaged folder. It never ends with another error, and never silently with another result."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import atoll
from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import AtollError, ConfigError
from atoll.core.events import RoundFinished, RunFinished
from atoll.core.serialization import load_tree
from atoll.core.verified_files import write_record, write_text
from atoll.data.prepare import Preparation, prepare
from atoll.engines.checkpoints import Checkpoints
from atoll.engines.elastic.leader_event_log import PROCESSES_FILE
from atoll.engines.elastic.run_identity import JoinFile, RunSecrets, run_id_of
from atoll.engines.elastic.spec import JOIN_INFO, JoinInfo
from atoll.engines.elastic.standby_rendezvous import LIGHTHOUSE_FILE, REVOKED_FILE, former_port, former_revoked
from atoll.engines.elastic.supervisor import former_processes
from atoll.engines.replay_async_run import replay_run
from atoll.engines.run_lifecycle import RunRequest
from atoll.engines.spec import read_spec
from atoll.runs.evaluate import evaluate
from atoll.runs.export import export, load_exported
from atoll.runs.generate import generate
from atoll.runs.run_settings import candidates
from atoll.telemetry import compare
from atoll.telemetry.event_log import read_events
from atoll.telemetry.report import report_sections
from atoll.telemetry.run_progress import read_progress
from atoll.telemetry.summary import read_summary
from atoll.telemetry.trace import write_trace
from tests.fuzzing import FUZZERS

LONGEST = 2_000  # characters of a message; paths of pytest are long
TRAINING = ["train.warm_start_steps=2", "keep.evaluate_every=4", "keep.save_every=2", "optimizer.lr.warmup=0"]
DECODER = ["model.layers=1", "model.width=16", "model.heads=2", "data.seq_len=16", "data.eval_batches=1", "cluster.islands=2"]
SETTINGS = [*DECODER, *TRAINING, "algorithm.inner_steps=2", "train.steps=6", "train.batch_size=2"]
POINTS = ["model.hidden=8", "data.examples=512", "data.dimensions=16", "data.clusters_per_class=1", "data.eval_examples=128"]
TOY = [*POINTS, *TRAINING[:2], "keep.save_every=4", "algorithm.inner_steps=4", "train.steps=12", "train.batch_size=8"]

Damage = Callable[[Path, random.Random], None]
Command = Callable[[Path], Any]


# ------------------------------------------------------------------------------------------------------------------ damages


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def halve(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path, chance: random.Random) -> None:
    path.write_bytes(b"")


def delete(path: Path, chance: random.Random) -> None:
    path.unlink()


def fill_with_nul(path: Path, chance: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def lose_a_block(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data))
    data[start : start + 64] = bytes(len(data[start : start + 64]))
    path.write_bytes(data)


def add_a_line(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + b"\x00garbage\n")


def nest(path: Path, chance: random.Random) -> None:
    path.write_text("[" * 200_000)


def become_a_folder(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def link_to_itself(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.symlink_to(path)


def link_to_a_copy(path: Path, chance: random.Random) -> None:
    """As a user does who moves a file to another disk."""
    outside = path.parents[len(path.relative_to(root_of(path)).parts)] / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)


def link_to_another_file(path: Path, chance: random.Random) -> None:
    outside = path.parents[len(path.relative_to(root_of(path)).parts)] / "outside"
    outside.write_text("precious")
    path.unlink()
    path.symlink_to(outside)


WHOLE: list[Damage] = [
    halve,
    empty,
    delete,
    fill_with_nul,
    add_a_line,
    nest,
    become_a_folder,
    link_to_itself,
    link_to_a_copy,
    link_to_another_file,
]
RANDOM: list[Damage] = [flip, flip, flip, cut, lose_a_block]


def root_of(path: Path) -> Path:
    return next(folder for folder in path.parents if folder.name == "root")


# ---------------------------------------------------------------------------------------------------- folders and commands


class Interruption(Exception):
    pass


class InterruptingSink:
    """Ends a run after this round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def emit(self, event: Any) -> None:
        if isinstance(event, RoundFinished) and event.round == self.round:
            raise Interruption


@pytest.fixture(scope="module")
def text_run(tmp_path_factory) -> tuple[Path, Any]:
    """The files of a Run on prepared text, and the Run."""
    base = tmp_path_factory.mktemp("damage")
    (base / "text").mkdir()
    for number in range(12):
        (base / "text" / f"{number}.txt").write_text(f"The island {number} trains, then sends its delta. " * 40)
    corpus = base / "root" / "prepared"
    prepare(Preparation(corpus=f"files:{base}/text", tokenizer="bpe:300", validation_fraction=0.2), corpus)
    return base, override(recipes.demo_diloco(), [*SETTINGS, f"data.corpus=prepared:{corpus}"], candidates)


@pytest.fixture(scope="module")
def finished(text_run) -> Path:
    base, run = text_run
    shutil.rmtree(base / "root" / "run", ignore_errors=True)
    atoll.run(run, out=base / "root" / "run")
    return _keep(base, "finished")


@pytest.fixture(scope="module")
def interrupted(text_run) -> Path:
    base, run = text_run
    shutil.rmtree(base / "root" / "run", ignore_errors=True)
    with pytest.raises(Interruption):
        atoll.run(run, out=base / "root" / "run", sinks=[InterruptingSink(3)])
    return _keep(base, "interrupted")


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("damage")
    atoll.run(override(recipes.toy_async(), TOY, candidates), out=base / "root" / "run")
    return _keep(base, "asynchronous")


def _keep(base: Path, name: str) -> Path:
    """A copy of the files, from which `root` is restored before each damage. Runs name their text by its path."""
    shutil.copytree(base / "root", base / name)
    return base / name


def restored(copy: Path) -> Path:
    root = copy.parent / "root"
    shutil.rmtree(root)
    shutil.copytree(copy, root)
    if os.path.lexists(copy.parent / "outside"):
        (copy.parent / "outside").unlink()
    return root


def resume(root: Path) -> Any:
    result = atoll.resume(root / "run")
    assert result is not None
    return result.params.digest(), result.val_loss, {name: value.sum().item() for name, value in result.module.named_parameters()}


def report(root: Path) -> Any:
    progress, console = read_progress(root / "run"), Console(width=200, file=io.StringIO())
    for section in report_sections(root / "run"):
        console.print(section)
    trace = write_trace(root / "run", root / "run" / "trace.json").read_text()
    assert isinstance(console.file, io.StringIO)
    return progress.position, read_summary(root / "run").to_json(), console.file.getvalue(), trace


def compare_alone(root: Path) -> Any:
    return json.dumps(compare.comparison([root / "run"]).to_dict())


def export_weights(root: Path) -> Any:
    out = export(root / "run", root.parent / "exported")
    try:
        return {name: value.tolist() for name, value in load_exported(out).state_dict().items()}, sorted(os.listdir(out))
    finally:
        shutil.rmtree(out)


def generate_text(root: Path) -> Any:
    return generate(root / "run", "The island", tokens=5, temperature=0.0, top_k=None, seed=0)


def evaluate_text(root: Path) -> Any:
    return evaluate(root / "run", f"files:{root.parent}/text/0.txt")


def replay(root: Path) -> Any:
    return replay_run(root / "run").to_dict()


READERS: Mapping[str, Command] = {
    "report": report,
    "compare": compare_alone,
    "export": export_weights,
    "generate": generate_text,
    "evaluate": evaluate_text,
}


# -------------------------------------------------------------------------------------------------------------- the fuzzer


def files_of(copy: Path) -> list[Path]:
    return sorted(path.relative_to(copy) for path in copy.rglob("*") if path.is_file())


def damages(copy: Path, repeats: int) -> Iterator[tuple[Path, Damage]]:
    """Every damage of the whole of every file, and random ones."""
    for file in files_of(copy):
        has_bytes = (copy / file).stat().st_size > 0
        for kind in [*WHOLE, *RANDOM * repeats]:
            if has_bytes or kind not in RANDOM:
                yield file, kind


def wrong(copy: Path, commands: Mapping[str, Command], share: int, repeats: int) -> tuple[list[str], int, int]:
    """What went wrong, how many commands were tried on damaged files, and how many of them refused these. Every `share`-th damage
    is tried. The last command may write files."""
    expected = {}
    for name, command in commands.items():
        expected[name] = command(restored(copy))
    found, tried, refused = list[str](), 0, 0
    for seed, (file, damage) in islice(enumerate(damages(copy, repeats)), None, None, share):
        root = restored(copy)
        damage(root / file, random.Random(seed))
        outside = copy.parent / "outside"
        before = outside.read_bytes() if outside.exists() else None
        for name, command in commands.items():
            what, tried = f"{name} after {damage.__name__} of {file} (seed {seed})", tried + 1
            try:
                result = command(root)
            except AtollError as error:
                refused += 1
                if len(str(error)) > LONGEST:
                    found.append(f"{what}: a message of {len(str(error))} characters: {str(error)[:200]}")
            except Exception as error:
                found.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
            else:
                if result != expected[name]:
                    found.append(f"{what}: another result")
            if before is not None and outside.read_bytes() != before:
                found.append(f"{what}: a file outside of the folder was written")
    sys.stdout.write(f"{tried} commands on damaged files, {refused} refused, {len(found)} wrong\n")
    return found, tried, refused


# Files have 15 damages each, so that every 4th is each of them in turn.
some_and_all = pytest.mark.parametrize(("share", "repeats"), [(4, 1), pytest.param(1, 3, marks=pytest.mark.slow)])


def least(fuzzer: str, share: int) -> int:
    return FUZZERS[fuzzer].slow if share == 1 else FUZZERS[fuzzer].fast


@some_and_all
def test_every_command_refuses_a_damaged_finished_run_or_reads_it_right(finished, share: int, repeats: int):
    found, tried, refused = wrong(finished, {**READERS, "resume": resume}, share, repeats)
    assert not found, "\n".join(found)
    assert tried >= least("commands on damaged files of a finished run", share)
    assert refused > tried / 4


@some_and_all
def test_an_interrupted_run_is_resumed_to_the_same_weights_or_refused(interrupted, share: int, repeats: int):
    found, tried, refused = wrong(interrupted, {"resume": resume}, share, repeats)
    assert not found, "\n".join(found)
    assert tried >= least("resumes of a damaged interrupted run", share)
    assert tried / 4 < refused < tried


@pytest.mark.slow
@pytest.mark.parametrize("engine", [atoll.Processes(processes=2), atoll.Elastic(processes=2)], ids=["processes", "elastic"])
def test_every_command_refuses_a_damaged_finished_run_of_real_processes_or_reads_it_right(text_run, engine):
    base, run = text_run
    shutil.rmtree(base / "root" / "run", ignore_errors=True)
    (base / "root" / "trace.json").unlink(missing_ok=True)
    atoll.run(run, engine=engine, out=base / "root" / "run")
    write_trace(base / "root" / "run", base / "root" / "run" / "trace.json")
    found, tried, refused = wrong(_keep(base, engine.name), {**READERS, "resume": resume}, 2, 1)
    assert not found, "\n".join(found)
    assert tried / 5 < refused < tried, "logs and the files of an elastic run's membership are read by none of these commands"


ENGINES = {
    "processes": ("toy-sync", ["engine.processes=2"]),
    "elastic": ("toy-sync", ["engine.processes=2", "engine.start_timeout_s=180", "engine.quorum_timeout_s=20"]),
    "ray": ("toy-async", ["engine.processes=2", "engine.save_every_s=0.5", "engine.hub_timeout_s=120"]),
}


@pytest.fixture(scope="session")
def stopped(tmp_path_factory) -> Callable[[str], Path]:
    """The files of a run on an engine that a user has stopped after its first checkpoint, made once for each engine."""
    made: dict[str, Path] = {}

    def files_of_stopped(engine: str) -> Path:
        if engine not in made:
            base = tmp_path_factory.mktemp(engine)
            (base / "root").mkdir()
            made[engine] = _stop_after_a_checkpoint(base, engine)
        return made[engine]

    return files_of_stopped


def _stop_after_a_checkpoint(base: Path, engine: str) -> Path:
    folder, (recipe, more) = base / "root" / "run", ENGINES[engine]
    slowly = ["train.steps=48", "cluster.step_time_s=[1.0]", "cluster.islands=2", "engine.step_delay=0.05"]
    sets = [part for one in (*TOY, *slowly, *more) for part in ("--set", one)]
    command = [sys.executable, "-m", "atoll", "run", recipe, *sets, "--engine", engine, "--out", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        deadline_s = time.monotonic() + 180.0
        while not [*folder.glob("checkpoints/[0-9]*/meta.json")]:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline_s, "it saved no checkpoint"
            time.sleep(0.01)
        process.terminate()
        said, _ = process.communicate(timeout=60)
    assert not (folder / "final.safetensors").exists(), said
    return _keep(base, "stopped")


def read_to_resume(root: Path) -> Any:
    """What a resumed run reads, without the processes that read it."""
    with RunRequest(run=None, spec=None, out=root / "run").open() as task:
        checkpoints = Checkpoints(task.folder.checkpoints, 1)
        newest = checkpoints.newest()
        assert newest is not None
        for name in newest.files:
            checkpoints.verify(newest, name)
        weights = [load_tree(path).digest() for path in sorted((root / "run").glob("*.safetensors"))]
        return task.run, task.spec, newest.metadata, newest.files, weights


def resume_to_the_end(root: Path) -> Any:
    """How many runs have finished, and the digest of the weights. On elastic islands and Ray their number: which of them trains a
    unit of data depends on time, and with it the last bits."""
    output = root.parent / "output"
    command = [sys.executable, "-m", "atoll", "run", "--resume", str(root / "run"), "--set", "engine.step_delay=0"]
    with output.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            process.wait(300.0)
        finally:
            process.terminate()
    said = output.read_text()
    assert "Traceback" not in said, said[-1000:]
    if process.returncode:
        assert process.returncode == 2, said[-1000:]
        raise ConfigError(said)
    finished = [event for event in read_events(root / "run" / "events.jsonl", [RunFinished]) if isinstance(event, RunFinished)]
    final = load_tree(root / "run" / "final.safetensors")
    assert final.flat.isfinite().all()
    return len(finished), final.digest() if isinstance(read_spec(root / "run"), atoll.Processes) else final.numel


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_stopped_run_of_real_processes_is_resumed_to_its_end_or_refused(stopped, engine: str):
    """Readers in this process refuse each damaged file or read it right. Then the command, whose processes start slowly: it meets
    one file of the checkpoint and all files that no reader refuses, damaged at once, and names the next one until it goes on."""
    copy = stopped(engine)
    damaged, tried = dict[Path, tuple[Damage, int]](), 1
    expected = read_to_resume(restored(copy))
    for number, file in enumerate(file for file in files_of(copy) if (copy / file).stat().st_size):
        for seed, damage in ((2 * number, flip), (2 * number + 1, cut)):
            root, tried = restored(copy), tried + 1
            damage(root / file, random.Random(seed))
            try:
                assert read_to_resume(root) == expected, f"{damage.__name__} of {file} (seed {seed})"
            except AtollError:
                continue
            if file not in damaged or number % 2:
                damaged[file] = damage, seed
    refused_by_readers = {path.name for path in files_of(copy) if (copy / path).stat().st_size} - {path.name for path in damaged}
    assert {"run.json", "engine.json", "meta.json"} <= refused_by_readers
    weights = max(copy.glob("run/checkpoints/*/*.safetensors"), key=lambda path: path.stat().st_size).relative_to(copy)
    assert weights not in damaged
    damaged[weights] = flip, 0
    numel = load_tree(copy / "run" / "warm_start.safetensors").numel
    finished = resume_to_the_end(restored(copy)) if engine == "processes" else (1, numel)
    refusals: list[str] = []
    while True:
        root, refusal, tried = restored(copy), "", tried + 1
        for file, (damage, seed) in damaged.items():
            damage(root / file, random.Random(seed))
        try:
            assert resume_to_the_end(root) == finished, f"with damages of {list(map(str, damaged))}"
        except ConfigError as error:
            refusal = str(error)
        if not refusal:
            break
        named = [file for file in damaged if file.parent.name != "logs" and str(root / file) in refusal.replace("\n", "")]
        assert named, f"{refusal} names none of {list(map(str, damaged))}"
        refusals.append(named[0].name)
        del damaged[named[0]]
    assert weights.name in refusals
    sys.stdout.write(f"{tried} readings and resumes; the command refuses {refusals}, and goes on with {list(map(str, damaged))}\n")
    assert tried >= FUZZERS["readings and resumes of damaged stopped runs on processes, elastic and Ray"].slow // len(ENGINES)


@pytest.fixture(scope="module")
def admitted(tmp_path_factory) -> Path:
    """The secrets of a run with a join file and a revoked one, the join file, and what the run's processes have kept in its folder
    and in a joiner's copy."""
    base, spec = tmp_path_factory.mktemp("damage"), atoll.Elastic(processes=1)
    run, copy = base / "root" / "run", base / "root" / "copy"
    for folder in (run, copy):
        folder.mkdir(parents=True)
    info = JoinInfo(spec.fitted(recipes.toy_sync()), spec, "127.0.0.1:1", run_id=run_id_of(run))
    write_text(run / JOIN_INFO, info.to_text())
    write_record(run / PROCESSES_FILE, {"processes": ["island-0000#1", "island-0001#2"]})
    write_record(copy / LIGHTHOUSE_FILE, {"port": 4711})
    write_record(copy / REVOKED_FILE, {"revoked": ["0123456789ab", "ba9876543210"]})
    join, revoked = (RunSecrets.invite(run, ("127.0.0.1:1",)) for _ in range(2))
    RunSecrets.revoke(run, revoked.credentials.identity)
    join.write(base / "root" / "join.json")
    return _keep(base, "admitted")


def kept(found: Any) -> Any:
    """A file that a user has removed counts as one that no process has kept yet."""
    if not found:
        raise ConfigError("no process has kept it")
    return found


MEMBERS: Mapping[str, Command] = {
    "gateway": lambda root: RunSecrets.read(root / "run"),
    "join": lambda root: JoinFile.read(root / "join.json"),
    "invite": lambda root: RunSecrets.invite(root / "run", ("127.0.0.1:1",)).credentials.run_id,
    "island": lambda root: JoinInfo.read(root / "run").to_text(),
    "supervisor": lambda root: kept(former_processes(root / "run")),
    "standby": lambda root: (kept(former_port(root / "copy")), kept(former_revoked(root / "copy"))),
}


@some_and_all
@pytest.mark.filterwarnings("ignore:.* holds keys, and other users have access to it")
def test_damaged_files_of_an_elastic_runs_membership_are_refused_or_read_right(admitted, share: int, repeats: int):
    found, tried, refused = wrong(admitted, MEMBERS, share, 8 * repeats)
    assert not found, "\n".join(found)
    assert tried >= least("readings of damaged secrets, join files and what processes keep for the next ones", share)
    assert tried / 8 < refused < tried


@some_and_all
def test_a_replay_refuses_a_damaged_run_or_gives_the_same_bits(asynchronous, share: int, repeats: int):
    found, tried, refused = wrong(asynchronous, {"compare": compare_alone, "replay": replay}, share, repeats)
    assert not found, "\n".join(found)
    assert tried >= least("replays of a damaged asynchronous run", share)
    assert tried / 8 < refused < tried
