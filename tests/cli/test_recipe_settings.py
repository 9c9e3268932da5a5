"""The command line with runs of classes that are not atoll's."""

import json
import shlex
import sys
from types import SimpleNamespace

import pytest

from atoll import recipes
from atoll.core.config.json_records import to_json
from atoll.engines.simulator.spec import Simulator
from atoll.engines.spec import write_spec


@pytest.fixture
def folder(tmp_path):
    """The folder of a run whose algorithm is of this class."""

    def made(name):
        run = {"format": 2, **to_json(recipes.demo_diloco()), "algorithm": {"type": name, "period": 20}}
        (tmp_path / "run.json").write_text(json.dumps(run))
        write_spec(tmp_path, Simulator())
        return tmp_path

    return made


@pytest.mark.parametrize(
    "verb", [["generate", "--prompt", "def f("], ["run", "--resume"], ["replay"], ["export", "--out", "model"]], ids=" ".join
)
def test_a_run_of_ones_own_class_is_refused_with_the_command_that_imports_it(verb, atoll, folder):
    made = folder("deep.easgd.EASGD")
    code, out, err = atoll(*verb, made)
    assert (code, out) == (2, "")
    assert f"{made} is a run of deep.easgd.EASGD, which is not a class of atoll" in err
    program, option, text, *rest = shlex.split(err[err.index("python -c") :])
    assert (program, option) == ("python", "-c")
    assert text == "import deep.easgd; from atoll.cli.main import main; main()"
    assert rest == [*verb, str(made)]


def test_a_class_of_a_script_can_be_opened_by_that_script_alone(atoll, folder):
    _, _, err = atoll("generate", folder("__main__.EASGD"))
    assert "Only the script that defines this class can open it" in err
    assert "python -c" not in err


def test_a_module_that_is_imported_and_lacks_the_class_is_not_said_to_be_imported_first(atoll, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "easgd", SimpleNamespace())
    code, _, err = atoll("generate", folder("easgd.EASGD"))
    assert code == 2
    assert "python -c" not in err
    assert "easgd.EASGD" in err
