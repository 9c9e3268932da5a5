"""The command `atoll`, called in this process."""

import sys

import pytest

from atoll.cli import main as cli


@pytest.fixture
def atoll(monkeypatch, capsys):
    """Calls the command; gives its exit code, standard output and standard error."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["atoll", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return call
