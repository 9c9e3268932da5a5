"""Libraries log problems alone, unless the user has chosen another level."""

import os

from atoll.core.library_logs import QUIET, quieten


def test_a_level_that_the_user_has_set_stays(monkeypatch):
    for name in QUIET:
        monkeypatch.setenv(name, "info")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    quieten()
    assert (os.environ["RUST_LOG"], os.environ["TORCH_CPP_LOG_LEVEL"]) == ("info", "ERROR")
