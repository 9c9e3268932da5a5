"""The command line as a user sees it."""

import json
import re
import shutil
import subprocess
import sys
from inspect import getdoc
from pathlib import Path

import pytest

from atoll import recipes
from atoll.core.events import Computed, Dispatched, Evaluated, RoundFinished, RunFinished, RunStarted, WindowClosed
from atoll.engines.elastic.spec import Elastic
from atoll.engines.spec import write_spec
from atoll.runs.export import load_exported
from atoll.runs.folder import RunFolder
from atoll.telemetry.event_log import JsonlSink
from atoll.telemetry.run_progress import read_progress
from atoll.testing.tiny_pretrained_model import SUMS, save_tiny_model, write_jsonl
from tests.samples import SMALL as TINY, arrived

SMALL = [*TINY, "train.steps=6", "train.warm_start_steps=0"]


def sets(*settings):
    return [part for setting in settings for part in ("--set", setting)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    from atoll.core.config.overrides import override
    from atoll.engines import run_lifecycle
    from atoll.runs.run_settings import candidates

    run = override(recipes.demo_diloco(), [*SMALL, "algorithm.inner_steps=3"], candidates)
    return run_lifecycle.run(run, out=tmp_path_factory.mktemp("cli") / "run").folder


@pytest.mark.parametrize(("command", "listed"), [("--help", "generate"), ("recipes", "demo-diloco")])
def test_help_and_the_list_of_recipes_need_no_torch(command, listed):
    code = f"import sys; sys.argv = ['atoll', '{command}']\nfrom atoll.cli.main import app\ntry: app()\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules, 'it imports torch'\nassert 'rich.progress' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert listed in done.stdout


def test_recipes_are_listed_with_what_they_do(atoll):
    code, out, _ = atoll("recipes")
    lines = [[name, *getdoc(make).splitlines()[0].split()] for name, make in recipes.ALL.items()]
    assert (code, [line.split() for line in out.splitlines()[1:]]) == (0, lines)


def test_every_recipe_can_be_shown(atoll):
    for name in recipes.ALL:
        code, out, _ = atoll("show", name, "--json")
        assert (code, json.loads(out)["recipe"]) == (0, name)


def test_show_lists_the_paths_that_set_takes(atoll):
    code, out, _ = atoll("show", "demo-diloco", *sets("cluster.islands=8"))
    assert code == 0
    assert "cluster.link.bandwidth_mbit_per_s" in out
    assert "algorithm.inner_steps" in out
    assert "[float, ...]" in out


def test_run_ends_with_one_json_object(atoll, tmp_path):
    code, out, err = atoll(
        "run", "demo-diloco", *sets(*SMALL, "algorithm.inner_steps=3"), "--seed", 3, "--out", tmp_path / "run", "--json", "--quiet"
    )
    assert code == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert (summary["recipe"], summary["seed"], summary["outer_steps"]) == ("demo-diloco", 3, 2)
    assert Path(summary["run_dir"]) == tmp_path / "run"


def test_resume_of_a_finished_run_prints_its_summary(atoll, finished):
    code, out, _ = atoll("run", "--resume", finished, "--json")
    assert code == 0
    assert json.loads(out.splitlines()[-1])["run_dir"] == str(finished)


def test_compare_runs_recipes_and_reads_folders_and_saves_a_plot(atoll, finished, tmp_path):
    code, out, err = atoll("compare", "demo-ddp", finished, *sets(*SMALL), "--out", tmp_path / "both", "--quiet")
    assert code == 0, err
    assert "demo-ddp" in out
    assert "demo-diloco" in out
    assert re.search(r"On links 10 times slower: demo-ddp [\d:.]+, demo-diloco [\d:.]+ \(simulated without training\)\.", out)
    assert (tmp_path / "both" / "comparison.png").stat().st_size > 10_000
    code, out, _ = atoll("compare", tmp_path / "both" / "demo-ddp-0", finished, "--out", tmp_path / "both", "--json")
    assert code == 0
    figures = json.loads(out)
    assert [run["recipe"] for run in figures["runs"]] == ["demo-ddp", "demo-diloco"]
    slower = figures["time_on_10_times_slower_links_s"]
    assert [slower[run["label"]] > run["virtual_time_s"] for run in figures["runs"]] == [True, True]


def test_compare_takes_files_for_the_simulator_alone_and_a_setting_can_be_meant_for_one_recipe_of_several(atoll, tmp_path):
    sets_of = sets(*SMALL, "demo-diloco:algorithm.inner_steps=2", "demo-ddp:algorithm.accumulation=2")
    (tmp_path / "mine.toml").write_text('recipe = "demo-ddp"\n')
    mine = tmp_path / "mine.toml"
    code, out, err = atoll("compare", mine, "demo-ddp", "demo-diloco", *sets_of, "--out", tmp_path / "both", "--json", "--quiet")
    assert code == 0, err
    described, ddp, diloco = json.loads(out)["runs"]
    assert described["recipe"] == "demo-ddp"
    assert described["tokens"] == ddp["tokens"] / 2, "the setting for the recipe is not for the file"
    assert (ddp["outer_steps"], diloco["outer_steps"]) == (6, 3)
    assert ddp["tokens"] == 2 * diloco["tokens"]
    mine.write_text('recipe = "demo-ddp"\n[engine]\nname = "elastic"\n')
    code, _, err = atoll("compare", mine)
    assert code == 2
    assert "is for the engine elastic, and compare simulates" in err


def test_a_model_can_be_named_by_its_preset(atoll):
    _, out, _ = atoll("show", "demo-diloco", *sets("model=m60"), "--json")
    assert json.loads(out)["model"]["width"] == 896
    _, out, _ = atoll("show", "demo-diloco", *sets("model.layers=1", "model=m60", "model.width=64"), "--json")
    assert [json.loads(out)["model"][name] for name in ("layers", "width")] == [3, 64]


@pytest.mark.parametrize("columns", ["40", "200"])
def test_show_lists_the_presets_of_models_whatever_the_width_of_a_terminal(columns, atoll, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert "GPT | MLP | Pretrained | tiny | m20 | m60 | m150 | m400 | small" in atoll("show", "demo-diloco")[1]


@pytest.mark.parametrize("given", [sets("train.steps=3"), ["--seed", "3"]], ids=" ".join)
def test_nothing_can_be_set_for_folders_alone(given, atoll, finished):
    code, _, err = atoll("compare", finished, *given)
    assert code == 2
    assert f"{' '.join(given) if '--set' in given else '--seed'} with folders alone ({finished}): these runs are finished" in err


def test_a_folder_that_is_no_finished_run_costs_no_run_of_a_recipe(atoll, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = atoll("compare", "demo-ddp", tmp_path)
    assert code == 2
    assert str(tmp_path) in err
    assert not (tmp_path / "runs").exists()


def test_the_version_is_shown(atoll):
    code, out, _ = atoll("--version")
    assert (code, out.strip()) == (0, "0.1.0")


def test_an_unfinished_run_is_reported_as_far_as_it_is(atoll, finished, tmp_path):
    half = tmp_path / "half"
    shutil.copytree(finished, half, ignore=shutil.ignore_patterns("digests.json"))
    lines = (half / "events.jsonl").read_text().splitlines()
    (half / "events.jsonl").write_text("\n".join(line for line in lines if "RunFinished" not in line) + "\n")
    code, out, err = atoll("report", half)
    assert code == 0, err
    assert "not finished" in out
    assert "not verified" in out
    assert (half / "trace.json").exists()


def test_ctrl_c_prints_how_to_resume(tmp_path):
    """A real signal to a real process, which sends it to itself in its second round."""
    code = (
        "import os, signal, sys\n"
        "from atoll.telemetry.console_progress import ConsoleSink\n"
        "plain = ConsoleSink.emit\n"
        "def emit(self, event):\n"
        "    if type(event).__name__ == 'RoundFinished':\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    plain(self, event)\n"
        "ConsoleSink.emit = emit\n"
        "from atoll.cli.main import main\n"
        "main()\n"
    )
    arguments = ["run", "demo-diloco", *sets(*SMALL, "algorithm.inner_steps=1"), "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert f"atoll run --resume {tmp_path / 'run'}" in done.stderr
    assert "Traceback" not in done.stderr


def test_report_writes_a_plot_and_a_trace(atoll, finished):
    code, _, err = atoll("report", finished)
    assert code == 0, err
    assert json.loads((finished / "trace.json").read_text())["traceEvents"]
    assert (finished / "plot.png").exists()


def test_without_matplotlib_there_is_a_warning_and_all_but_the_plots(atoll, finished, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("*.png", "trace.json", "digests.json"))
    code, out, err = atoll("report", folder)
    assert (code, list(folder.glob("*.png"))) == (0, []), err
    assert "no plots: figures need matplotlib.figure" in err
    assert f"trace: {folder / 'trace.json'}" in out
    for extra in ((), ("--json",)):
        code, out, err = atoll("compare", folder, "--out", tmp_path / "both", *extra)
        assert (code, "no plots" in err, "plot: " in out) == (0, True, False), err
    assert json.loads(out)["plot"] is None


def test_windows_is_refused_in_one_line(atoll, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert atoll("recipes") == (
        2,
        "",
        "error: atoll needs Linux or macOS, and this is Windows. Install and start it inside WSL 2.\n",
    )


def test_report_prints_and_draws_an_asynchronous_run(atoll, finished, tmp_path):
    folder = tmp_path / "hub"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("*.png", "trace.json", "digests.json"))
    with JsonlSink(folder / "events.jsonl") as log:
        for event in at_a_hub(rounds=6):
            log.emit(event)
    code, out, err = atoll("report", folder)
    assert code == 0, err
    assert "staleness  0 on average, at most 0" in out
    assert "worker" in out
    for name in ("plot.png", "asynchrony.png", "trace.json"):
        assert (folder / name).exists()
        assert str(folder / name) in out.replace("\n", "")
    figures = json.loads(atoll("report", folder, "--json")[1])["asynchrony"]
    assert (figures["arrivals"], figures["windows"], figures["steps_per_shard"]) == (6, 6, {"0": 12})
    assert "asynchrony" not in json.loads(atoll("report", finished, "--json")[1])
    assert not (finished / "asynchrony.png").exists()


def test_a_run_that_all_workers_left_before_the_first_arrival_is_reported(atoll, tmp_path):
    gone = ",".join(f"Outage(island={island},start_s=1.0)" for island in range(4))
    settings = sets(*TINY, "train.steps=30", "train.warm_start_steps=0", f"cluster.outages=[{gone}]")
    code, _, err = atoll("run", "demo-async", *settings, "--out", tmp_path / "run")
    assert code == 2
    assert "no worker is left and none will return, after 0 of 120 local updates" in err
    assert "Start a new run" in err
    _, out, err = atoll("report", tmp_path / "run")
    assert "no update has arrived at the hub yet" in out
    assert "has not finished a round yet, so there is nothing to draw" in err


def test_the_account_of_a_real_asynchronous_run_adds_up(atoll, tmp_path):
    settings = sets(
        *TINY, "train.steps=30", "train.warm_start_steps=0", "cluster.outages=[Outage(island=2,start_s=15.3,stop_s=25)]"
    )
    code, out, err = atoll("run", "demo-async", *settings, "--out", tmp_path / "run", "--json", "--quiet")
    assert code == 0, err
    summary = json.loads(out.splitlines()[-1])
    figures = summary["asynchrony"]
    assert figures["arrivals"] == sum(worker["rounds"] for worker in figures["workers"]) == summary["rounds"]
    assert sum(figures["steps_per_shard"].values()) == summary["local_updates"]
    assert figures["returned"] == 1
    for worker in figures["workers"]:
        parts = sum(worker[name] for name in ("computed_s", "talked_s", "waited_s", "unfinished_s"))
        assert parts == pytest.approx(worker["present_s"])
        away_s = 25 - 15.3 if worker["island"] == 2 else 0.0
        assert worker["present_s"] == pytest.approx(summary["virtual_time_s"] - away_s)
    assert read_progress(tmp_path / "run").utilisation() == pytest.approx(summary["utilisation"])


def at_a_hub(rounds):
    """What one worker and a hub would report: two steps of a second, and half a second for each way."""
    yield RunStarted(recipe="demo-async", algorithm="AsyncLocalSGD", islands=1, params=10, steps=2 * rounds, seed=0)
    for number in range(rounds):
        totals = {"steps": 2 * number, "tokens": 16 * number, "local_updates": 2 * number, "sent_bytes_per_island": 8.0 * number}
        now_s, who = 3.0 * number, {"island": 0, "round": number, "steps": 2}
        yield Evaluated(round=number, virtual_time_s=now_s, metrics={"loss": 3.0 - 0.1 * number}, **totals)
        yield Dispatched(
            version=number, shard=0, start=0, schedule=0, virtual_time_s=now_s, begin_s=now_s + 0.5, sent_bytes=8, **who
        )
        yield Computed(start_s=now_s + 0.5, end_s=now_s + 2.5, batches=2, tokens=16, loss=3.0, **who)
        end = {"pushed_s": now_s + 2.5, "virtual_time_s": now_s + 3.0, "sent_bytes": 8}
        yield arrived(window=number, version=number + 1, **end, **who)
        after = {"steps": 2 * number + 2, "tokens": 16, "local_updates": 2, "sent_bytes_per_island": 8.0}
        yield RoundFinished(round=number + 1, islands=1, virtual_time_s=now_s + 3.0, loss=3.0, **after)
        yield WindowClosed(window=number, islands=[0], opened_s=now_s + 3.0, virtual_time_s=now_s + 3.0, idle_s=[0.0])
    totals = {"steps": 2 * rounds, "tokens": 16 * rounds, "local_updates": 2 * rounds, "sent_bytes_per_island": 8.0 * rounds}
    rest = {"warm_start_tokens": 0, "utilisation": 2 / 3, "control_bytes_per_island": 0.0, "val_loss": 2.5, "digest": ""}
    yield RunFinished(rounds=rounds, outer_steps=rounds, virtual_time_s=3.0 * rounds, **totals, **rest)


def test_help_names_a_default_that_cannot_be_seen(atoll):
    assert "[default: (a line break)]" in " ".join(atoll("generate", "--help")[1].replace("│", " ").split())


def test_generate_continues_from_the_prompt_and_is_repeatable(atoll, finished):
    first, second = (atoll("generate", finished, "--prompt", "def ", "--tokens", 20, "--seed", 1) for _ in range(2))
    assert first == second
    assert first[0] == 0
    assert first[1].startswith("def ")


def test_a_pretrained_model_is_finetuned_reported_asked_and_exported(atoll, tmp_path):
    model, data = save_tiny_model(tmp_path / "model"), write_jsonl(tmp_path / "sums.jsonl", SUMS)
    given = sets(f"model.path={model}", f"data.path={data}", "train.steps=2", "cluster.islands=2")
    code, out, err = atoll("run", "finetune", *given, "--out", tmp_path / "run")
    assert code == 0
    assert "folder:" in out
    assert "Loading weights" not in err, "the library's own bars stay away"
    assert atoll("report", tmp_path / "run")[0] == 0
    assert atoll("generate", tmp_path / "run", "--prompt", "2+2=", "--tokens", 3)[1].startswith("2+2=")
    code, out, _ = atoll("export", tmp_path / "run", "--out", tmp_path / "tuned")
    assert (code, "AutoModelForCausalLM.from_pretrained" in out) == (0, True)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "tuned").iterdir()}


def test_a_decoder_is_exported_and_can_be_loaded(atoll, finished, tmp_path):
    code, out, _ = atoll("export", finished, "--out", tmp_path / "decoder")
    assert (code, "AutoModelForCausalLM.from_pretrained" in out) == (0, True)
    assert load_exported(tmp_path / "decoder").config.width == 16


def test_prepared_text_can_be_trained_on(atoll, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(30):
        (tmp_path / "text" / f"{number}.txt").write_text(f"Island number {number} lies in the sea. " * 20)
    out = tmp_path / "tokens"
    code, said, err = atoll("data", "prepare", f"files:{tmp_path / 'text'}", "--out", out, "--tokenizer", "bpe:300", "--quiet")
    assert code == 0, err
    assert f"prepared:{out}" in said
    small = [setting for setting in SMALL if not setting.startswith("data.limit")]
    code, said, err = atoll(
        "run", "demo-ddp", *sets(*small, f"data.corpus=prepared:{out}"), "--out", tmp_path / "run", "--json", "--quiet"
    )
    assert code == 0, err
    assert json.loads(said.splitlines()[-1])["params"] > 300 * 16


def test_a_folder_that_was_prepared_is_not_overwritten(atoll, tmp_path):
    (tmp_path / "text.txt").write_text("one two three four five " * 200)
    asked = ["data", "prepare", f"files:{tmp_path / 'text.txt'}", "--out", tmp_path / "tokens", "--quiet"]
    code, first, err = atoll(*asked)
    assert code == 0, err
    written = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "tokens").iterdir()}
    code, _, err = atoll(*asked, "--tokenizer", "bpe:270")
    assert code == 2
    assert "something else that was prepared: tokenizer=bytes, asked for is bpe:270. Use another folder" in err
    code, second, err = atoll(*asked)
    assert (code, second) == (0, first)
    assert "was prepared by the same command before, and is left as it is" in err
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "tokens").iterdir()} == written


# --------------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "given", "todo"),
    [
        (["run", "demo-dilco"], "demo-dilco", "demo-diloco"),
        (["run"], "no recipe", "--resume"),
        (["run", "demo-diloco", *sets("algorithm.inner_step=5")], "algorithm.inner_step", "algorithm.inner_steps"),
        (["run", "demo-diloco", *sets("algorithm.inner_steps=0")], "inner_steps=0", "Use 1"),
        (["run", "demo-diloco", *sets("algorithm.inner_steps=7")], "train.steps=", "Use train.steps="),
        (["run", "demo-diloco", *sets("algorithm.inner_steps=many")], "many", "int"),
        (["run", "demo-diloco", *sets("cluster.islands=0")], "islands=0", "at least 1"),
        (["run", "demo-diloco", *sets("cluster.link.bandwidth_mbit_per_s=-5")], "bandwidth_mbit_per_s=-5", "more than 0"),
        (["run", "demo-diloco", *sets("algorithm.outer=Adagrad(lr=1)")], "Adagrad", "Nesterov"),
        (["run", "demo-diloco", *sets("train.batch_size=0")], "batch_size=0", "positive"),
        (["run", "demo-diloco", "--set", "nothing"], "nothing", "="),
        (["run", "demo-diloco", *sets("data.corpus=web:pages")], "web:pages", "files:"),
        (["run", "demo-diloco", *sets("data.corpus=files:/nowhere/at/all")], "/nowhere/at/all", ""),
        (["run", "--resume", "/nowhere/at/all"], "/nowhere/at/all", "--out"),
        (["compare", "demo-ddp", "demo-dilco"], "no recipe 'demo-dilco'", "Did you mean demo-diloco?"),
        (["compare", "runs/nope", "demo-ddp"], "no recipe 'runs/nope', and no run's folder or file", "folder of a finished run"),
        (
            ["compare", "demo-diloco", *sets("demo-ddp:train.steps=3")],
            "demo-ddp, which does not run here",
            "The command runs demo-diloco.",
        ),
        (
            ["run", "demo-diloco", *sets("demo-ddp:train.steps=3")],
            "demo-ddp, which does not run here",
            "The command runs demo-diloco.",
        ),
        (["compare", "demo-diloco", *sets("demo-dilcoo:train.steps=3")], "none called 'demo-dilcoo'", "Did you mean demo-diloco?"),
        (["show", "demo-diloco", *sets("model=m61")], "tiny | m20 | m60 | m150 | m400 | small", "Did you mean m60?"),
        (["run", "demo-diloco", *sets("algorithm.inner_steps")], "'algorithm.inner_steps' has no '='", "algorithm.inner_steps=20."),
        (["report", "/nowhere/at/all"], "/nowhere/at/all", ""),
        (["generate", "/nowhere/at/all"], "/nowhere/at/all", ""),
        (["show", "nothing"], "nothing", "demo-diloco"),
        (["run", "finetune"], "model.path and data.path", "atoll run finetune --set model.path="),
        (["run", "finetune", *sets("model.path=nowhere", "data.path=x.jsonl")], "model.path='nowhere'", "Give the folder"),
        (["run", "demo-acco", *sets("train.batch_size=7")], "train.batch_size=7", "train.batch_size=6 or 8"),
        (["run", "demo-dpu", *sets("train.steps=9")], "algorithm.warmup=40", "algorithm.warmup="),
        (["run", "demo-two-level", *sets("inside=DiLoCo(inner_steps=20)")], "DiLoCo", "DDP | ZeRO1 | FSDP | ACCO | DPU | WP"),
        (["export", "/nowhere/at/all", "--out", "model"], "/nowhere/at/all", "--out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_gets_a_message_and_exit_code_2_and_no_traceback(arguments, given, todo, atoll, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = atoll(*arguments)
    assert code == 2
    assert out == ""
    assert given in err
    assert todo in err
    assert "Traceback" not in err
    assert "folder: " not in err, "there is none"
    assert not (tmp_path / "runs").exists()


def test_a_run_that_was_not_begun_when_it_was_interrupted_prints_no_command_to_resume(atoll, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("atoll.engines.warm_start_training.load_data", interrupted)
    code, _, err = atoll("run", "demo-diloco", "--out", tmp_path / "run")
    assert (code, err) == (130, "interrupted before the run began.\n")


@pytest.mark.parametrize(
    ("settings", "who"),
    [
        ([], "DDP on 4 islands, "),
        (["cluster.devices_per_island=2"], "DDP on 8 devices of 4 islands, all equals, "),
        (["cluster.devices_per_island=2", "cluster.islands=1"], "DDP on 2 devices of 1 island, all equals, "),
        (["cluster.devices_per_island=2", "algorithm=DiLoCo(inner_steps=1)", "inside=DDP"], "over DDP on 4 islands of 2 devices, "),
    ],
)
def test_a_run_prints_its_folder_and_its_islands(settings, who, atoll, tmp_path):
    code, _, err = atoll(
        "run", "demo-ddp", *sets(*TINY, "train.steps=2", "train.warm_start_steps=0", *settings), "--out", tmp_path / "run"
    )
    assert code == 0, err
    lines = err.splitlines()
    assert lines[0] == f"folder: {tmp_path / 'run'}"
    assert f"demo-ddp: {'DiLoCo ' if 'over' in who else ''}{who}" in lines[1]


def test_a_run_prints_once_that_there_is_no_device_for_bfloat16(atoll, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    given = sets(*TINY, "train.steps=2", "train.warm_start_steps=2", "train.device=auto", "train.precision=bf16")
    code, _, err = atoll("run", "demo-ddp", *given, "--out", tmp_path / "run")
    assert code == 0, err
    assert err.count("train.precision=bf16: ignored, since train.device=auto finds no CUDA device here.") == 1
    assert "bf16" not in atoll("run", "demo-ddp", *given, "--out", tmp_path / "quiet", "--quiet")[2]


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "empty"), ("too short", "seq_len")],
)
def test_a_corpus_that_is_empty_or_shorter_than_one_sequence_is_refused(content, message, atoll, tmp_path):
    (tmp_path / "text.txt").write_text(content)
    code, _, err = atoll(
        "run", "demo-diloco", *sets(f"data.corpus=files:{tmp_path / 'text.txt'}"), "--out", tmp_path / "run", "--quiet"
    )
    assert code == 2
    assert message in err


def test_a_corpus_that_is_not_text_is_refused_by_name(atoll, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"abc\xff\xfe\x00" * 100)
    code, _, err = atoll(
        "run", "demo-diloco", *sets(f"data.corpus=files:{tmp_path / 'text.txt'}"), "--out", tmp_path / "run", "--quiet"
    )
    assert code == 2
    assert "text.txt" in err


def test_a_tokenizer_that_does_not_fit_the_shards_is_refused(atoll, tmp_path):
    (tmp_path / "text.txt").write_text("one two three four five " * 200)
    for name, size in (("a", 270), ("b", 280)):
        assert (
            atoll("data", "prepare", f"files:{tmp_path / 'text.txt'}", "--out", tmp_path / name, "--tokenizer", f"bpe:{size}")[0]
            == 0
        )
    other = tmp_path / "b" / "tokenizer.json"
    code, _, err = atoll(
        "run", "demo-ddp", *sets(f"data.corpus=prepared:{tmp_path / 'a'}", f"data.tokenizer={other}"), "--out", tmp_path / "run"
    )
    assert code == 2
    assert "tokenizer" in err


def test_a_loss_that_is_not_finite_stops_the_run_and_is_located(atoll, tmp_path):
    explosive = sets(
        *[setting for setting in SMALL if not setting.startswith("optimizer")],
        "algorithm.inner_steps=3",
        "optimizer=SGD(lr=1e18)",
        "train.clip_norm=none",
    )
    code, _, err = atoll("run", "demo-diloco", *explosive, "--out", tmp_path / "run", "--quiet")
    assert code == 2
    assert "on island" in err
    assert "round" in err


def test_a_finished_run_is_extended_in_a_new_folder_where_its_schedule_allows_it(atoll, finished, tmp_path):
    code, _, err = atoll("run", "--resume", finished, "--extend", "6", "--out", tmp_path / "longer")
    assert code == 2
    assert "optimizer.lr is a Cosine as long as the run" in err
    constant = sets(*SMALL[:-3], "algorithm.inner_steps=3", "train.steps=6", "train.warm_start_steps=0", "optimizer.lr=0.01")
    atoll("run", "demo-diloco", *constant, "--out", tmp_path / "first", "--quiet")
    for refused in (
        ["--seed", "1"],
        ["--set", "train.batch_size=2"],
        ["--engine", "processes"],
        ["--elastic"],
        ["--processes", "2"],
        ["--workload", "atoll.testing.simulated_runs:Regression"],
    ):
        code, _, err = atoll("run", "--resume", tmp_path / "first", "--extend", "6", "--out", tmp_path / "longer", *refused)
        assert code == 2, err
        assert not (tmp_path / "longer").exists(), err
    code, out, _ = atoll("run", "--resume", tmp_path / "first", "--extend", "6", "--out", tmp_path / "longer", "--quiet", "--json")
    assert (code, json.loads(out)["steps"]) == (0, 12)
    assert json.loads(out)["run_dir"] == str(tmp_path / "longer")
    for given, advice in (([], ""), (["demo-diloco"], " Leave out demo-diloco.")):
        message = f"error: --extend 7 is for a finished run: atoll run --resume DIR --extend 7.{advice}\n"
        assert atoll("run", *given, "--extend", "7") == (2, "", message)


def test_the_engine_of_a_run_that_is_extended_is_checked_before_its_workload(atoll, tmp_path):
    folder = RunFolder.create(tmp_path / "run", recipes.toy_sync(), ["test"])
    write_spec(folder.path, Elastic())
    folder.workload.write_text("user.Loop\n")
    code, _, err = atoll("run", "--resume", folder.path, "--extend", "6")
    assert code == 2
    assert "is a run on elastic, which winds down before its end" in err


def test_resuming_as_another_recipe_is_refused_with_what_differs(atoll, finished):
    code, _, err = atoll("run", "demo-ddp", "--resume", finished)
    assert code == 2
    assert "DDP" in err


@pytest.mark.parametrize(
    ("arguments", "todo"),
    [
        (["run", "demo-diloco"], "Use --engine processes, or start the command once, without torchrun."),
        (["run", "demo-diloco", "--engine", "sim"], "with --engine simulator. Use --engine processes"),
        (["run", "--resume", "simulated"], "with --engine simulator. Use --engine processes"),
        (["compare", "demo-ddp", "demo-diloco"], "start the command once, without torchrun."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_simulation_under_torchrun_is_refused(arguments, todo, atoll, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "simulated").symlink_to(finished)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    code, out, err = atoll(*arguments)
    assert (code, out) == (2, "")
    assert "started 2 processes (WORLD_SIZE=2, RANK=1)" in err
    assert todo in err
    assert not (tmp_path / "runs").exists()


def test_set_with_resume_is_refused(atoll, finished):
    code, _, err = atoll("run", "--resume", finished, *sets("train.batch_size=9"))
    assert code == 2
    assert "a run resumes with the settings that it began with" in err
    code, _, err = atoll("run", "--resume", finished, *sets("train.steps=9"))
    assert code == 2
    assert f"more steps, in a new folder: atoll run --resume {finished} --extend N" in err


def test_a_full_disk_while_saving_stops_the_run_with_a_message_and_the_older_checkpoint_stands(tmp_path):
    """A real disk of 600 kB, seen by this process alone: the second or third checkpoint does not fit."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=600k tmpfs {disk}"
    private = ["unshare", "--mount", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*private, mount], capture_output=True, check=False).returncode:
        pytest.skip("a small disk can be mounted by root only")
    run = [sys.executable, "-m", "atoll", "run", "demo-diloco", "--quiet", "--out", str(disk / "run")]
    run += sets(*SMALL, "algorithm.inner_steps=1", "keep.save_every=1", "keep.checkpoints=9")
    script = f'{mount}; "$@"; code=$?; ls {disk}/run/checkpoints; exit $code'
    done = subprocess.run([*private, script, "sh", *run], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "00000001" in done.stdout.split()
    assert all(name.isdigit() for name in done.stdout.split()), "something unfinished was left behind"
