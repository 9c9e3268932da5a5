"""Config files: `atoll show --toml`, and `atoll run FILE`."""

import json
import re
import sys

import pytest

from atoll import recipes
from atoll.cli import main
from atoll.cli.recipe_settings import described, run_of, spec_of
from atoll.core.config.describe_settings import describe, explanations, first_sentence, type_text
from atoll.core.config.type_checks import hints_of, settable
from atoll.engines.elastic.spec import Elastic
from atoll.engines.spec import SPECS, write_spec
from atoll.runs.folder import RunFolder
from atoll.runs.run_settings import candidates

SHORT = [
    f"--set={one}" for one in ("train.steps=4", "algorithm.inner_steps=2", "train.warm_start_steps=0", "optimizer.lr.warmup=0")
]


@pytest.mark.parametrize("engine", SPECS)
def test_a_file_of_show_gives_the_same_run_and_engine(engine, atoll, tmp_path):
    for name in recipes.ALL:
        code, text, _ = atoll("show", name, "--engine", engine, "--toml")
        file = tmp_path / f"{name}.toml"
        file.write_text(text)
        assert code == 0
        assert "\"'" not in text, "text that needs no second pair of quotes"
        assert described(str(file)) == (recipes.recipe(name), SPECS[engine]())


def test_set_changes_a_setting_of_a_file(atoll, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(atoll("show", "demo-diloco", "--toml")[1])
    assert run_of(str(file), ["algorithm.outer.lr=0.5"], 3) == run_of("demo-diloco", ["algorithm.outer.lr=0.5"], 3)


def test_a_file_may_hold_only_what_differs_from_its_recipe(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'recipe = "demo-diloco"\nmodel = "m20"\n[algorithm.outer]\nlr = 0.5\n[train]\nclip_norm = "none"\n'
        '[engine]\nname = "elastic"\nlisten = "127.0.0.1:7000"\n'
    )
    same = run_of("demo-diloco", ["model=m20", "algorithm.outer.lr=0.5", "train.clip_norm=none"], None)
    assert run_of(str(file), [], None) == same
    assert spec_of(str(file), None) == SPECS["elastic"](listen="127.0.0.1:7000")
    assert spec_of(str(file), "simulator") == SPECS["simulator"]()


def test_the_run_json_of_a_run_is_a_file_to_run_again(atoll, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    digest = json.loads(atoll("run", "demo-diloco", *SHORT, "--out", first, "--quiet", "--json")[1])["digest"]
    assert json.loads(atoll("run", first / "run.json", "--out", second, "--quiet", "--json")[1])["digest"] == digest
    assert (first / "run.json").read_text() == (second / "run.json").read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('recipe = "demo-diloco"\n[train]\nstepz = 4\n', ("train.stepz", "train.steps")),
        ('recipe = "demo-diloco"\n[train]\nsteps = "many"\n', ("train.steps=many", "Allowed: int")),
        ('recipe = "demo-diloco"\n[train]\nsteps = 2026-01-01\n', ("train.steps=2026-01-01", "number")),
        ('recipe = "demo-diloco"\n[algorithm]\ntype = "Diloco"\n', ("algorithm=Diloco", "Did you mean DiLoCo?")),
        ('recipe = "demo-dilocq"\n', ("there is no recipe", "demo-diloco")),
        ("seed = 1\n", ("`recipe`", "demo-diloco")),
        ('recipe = "demo-diloco"\n[engine]\nlisten = "x"\n', ("[engine] has no name", "elastic")),
        ('recipe = "demo-diloco"\n[engine]\nname = "elastic"\nlisten = "x"\n', ("engine.listen=x", "HOST:PORT")),
        ("recipe = demo\n", ("cannot be read as TOML", "line 1")),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_what_is_allowed(text, said, atoll, tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    code, _, error = atoll("run", file)
    assert code == 2
    assert error.count("\n") == 1
    assert all(part in error for part in (str(file), *said)), error


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("no.toml", "error: there is no file no.toml. Give a TOML file, such as `atoll show RECIPE --toml > no.toml` writes.\n"),
        (
            "demo-dilco",
            "error: there is no recipe 'demo-dilco'. Did you mean demo-diloco? `atoll recipes` describes all of them.\n",
        ),
        (
            "old",
            "error: old is a folder. `atoll run --resume old` continues the run in it; `atoll run old/run.json` begins it again.\n",
        ),
    ],
)
def test_what_is_neither_recipe_nor_file_is_refused_with_what_was_meant(given, said, atoll, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old/run.json").touch()
    assert atoll("run", given) == (2, "", said)


def test_every_setting_of_every_recipe_rule_and_engine_is_explained():
    runs = [setting for name in recipes.ALL for setting in describe(recipes.recipe(name))]
    engines = [setting for spec in SPECS.values() for setting in describe(spec())]
    assert [setting.path for setting in [*runs, *engines] if not setting.about or "None" in setting.about] == []
    unexplained = [
        (kind.__name__, name)
        for kinds in candidates.values()
        for kind in kinds
        for name in settable(kind)
        if name not in explanations(kind)
    ]
    assert unexplained == []


def test_every_word_that_a_setting_allows_occurs_in_its_one_sentence():
    values = [recipes.recipe(name) for name in recipes.ALL] + [spec() for spec in SPECS.values()]
    shown = {(setting.path, setting.about, setting.kind) for value in values for setting in describe(value)}
    kinds = [kind for kinds in candidates.values() for kind in kinds]
    shown |= {
        (name, first_sentence(explanations(kind)[name]), type_text(hints_of(kind)[name], {}))
        for kind in kinds
        for name in settable(kind)
    }
    words = [
        (path, about, word.strip("'"))
        for path, about, kind in shown
        for word in kind.split(" | ")
        if re.fullmatch(r"'.*'|[a-z]\S*", word)
    ]
    types = {"int", "float", "bool", "str", "none"}
    assert [(path, word) for path, about, word in words if word not in types and word not in about] == []


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_show_on_a_terminal_keeps_an_explanation_together_whatever_the_width(columns, atoll, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = atoll("show", "demo-diloco")[1].splitlines()
    assert max(map(len, lines)) <= columns
    at = lines.index("model.width = 32")
    assert lines[at + 1] == "    size of the residual stream  (int)"


def test_show_explains_each_setting_in_its_line(atoll):
    lines = atoll("show", "demo-diloco")[1].splitlines()
    assert any(line.split()[:1] == ["train.batch_size"] and "sequences (or points) per inner step" in line for line in lines)
    assert not any(line.endswith(" ") for line in lines)


@pytest.fixture
def completed(monkeypatch, capsys):
    """What a shell offers after these words."""

    def complete(typed):
        words = {"_ATOLL_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
        for name, value in words.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            main.app(prog_name="atoll")
        out, err = capsys.readouterr()
        assert err == ""
        return out.split()

    return complete


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("atoll ru", "run"),
        ("atoll run demo-dil", "demo-diloco"),
        ("atoll run demo-diloco --set train.st", "train.steps="),
        ("atoll run demo-diloco --engine elastic --set engine.l", "engine.listen="),
        ("atoll run --elastic --set engine.l", "engine.listen="),
        ("atoll show demo-async --engine ray --set engine.hub", "engine.hub_timeout_s="),
        ("atoll sweep demo-diloco --grid train.w", "train.warm_start_steps="),
        ("atoll run --resume FOLDER --set engine.l", "engine.listen="),
        ("atoll run demo-diloco --set algorithm=D", "algorithm=DiLoCo"),
        ("atoll run demo-diloco --set model=m", "model=m60"),
        ("atoll show demo-diloco --engine elastic --set engine.network=", "engine.network=trusted"),
        ("atoll compare demo-d", "demo-diloco"),
        ("atoll compare demo-ddp demo-d", "demo-diloco"),
    ],
)
def test_a_shell_completes_commands_recipes_and_settings(typed, offered, completed, tmp_path):
    write_spec(RunFolder.create(tmp_path / "run", recipes.toy_sync(), ["test"]).path, Elastic())
    assert offered in completed(typed.replace("FOLDER", str(tmp_path / "run")))


def test_numbers_are_not_completed(completed):
    assert completed("atoll run demo-diloco --set train.steps=") == []


def test_completion_offers_nothing_and_says_nothing_about_a_file_that_cannot_be_read(completed, tmp_path):
    (tmp_path / "bad.toml").write_text("recipe = ")
    assert completed(f"atoll run {tmp_path / 'bad.toml'} --set train.s") == []
    assert completed("atoll run --engine elastic demo-dilco --set engine.l") == []


def test_a_hidden_command_is_not_suggested(atoll):
    code, _, error = atoll("islnd")
    assert code == 2
    assert "island" not in error
    assert "Did you mean 'recipes'" in atoll("recipe")[2]
