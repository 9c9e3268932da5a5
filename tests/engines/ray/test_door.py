"""The way to Ray: without it all the rest can be imported, and what cannot be reached is said at once."""

import os
import socket
import subprocess
import sys

import pytest

from atoll.engines.ray import door
from atoll.errors import ConfigError


def test_all_that_runs_on_ray_can_be_imported_without_it():
    names = "atoll.engines.ray.actors, atoll.engines.ray.engine, atoll.runs.on_ray, atoll.cli.on_ray"
    text = f"import sys\nsys.modules['ray'] = None\nimport {names}\nassert sys.modules['ray'] is None"
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install "atoll\[ray\]"'):
        door.check_installed()


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:no", "nobody.invalid:1", ":"])
def test_an_address_that_is_none_is_refused_with_advice(address):
    with pytest.raises(ConfigError, match=r"nothing answers there .*leave it out to start one"):
        door.reachable(address)


def test_somebody_who_listens_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert door.reachable(f"127.0.0.1:{server.getsockname()[1]}") == "127.0.0.1"


def test_a_token_is_new_for_every_ray_and_its_owners_alone(tmp_path):
    first = door._new_token(tmp_path).read_text()
    path = door._new_token(tmp_path)
    assert (len(path.read_text()), path.read_text() == first) == (64, False)
    assert path.stat().st_mode & 0o077 == 0


def test_the_environment_is_left_as_it_was(monkeypatch):
    monkeypatch.setenv("ATOLL_TEST_KEPT", "before")
    monkeypatch.delenv("ATOLL_TEST_NEW", raising=False)
    with door._environment({"ATOLL_TEST_KEPT": "during", "ATOLL_TEST_NEW": "x"}):
        assert (os.environ["ATOLL_TEST_KEPT"], os.environ["ATOLL_TEST_NEW"]) == ("during", "x")
    assert (os.environ["ATOLL_TEST_KEPT"], "ATOLL_TEST_NEW" in os.environ) == ("before", False)
