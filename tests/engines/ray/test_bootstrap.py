"""The way to Ray: without it all the rest can be imported, and what cannot be reached is said at once."""

import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from atoll.core.errors import ConfigError
from atoll.engines.ray import bootstrap


def test_all_that_runs_on_ray_can_be_imported_without_it():
    names = "atoll.engines.ray.engine, atoll.engines.ray.launch, atoll.cli.run_ray"
    text = f"import sys\nsys.modules['ray'] = None\nimport {names}\nassert sys.modules['ray'] is None"
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install "atoll\[ray\]"'):
        bootstrap.check_installed()


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:no", "nobody.invalid:1", ":"])
def test_an_address_that_is_none_is_refused_with_advice(address):
    with pytest.raises(ConfigError, match=r"nothing listens there .*leave it out to start one"):
        bootstrap.check_reachable(address)


def test_somebody_who_listens_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert bootstrap.check_reachable(f"127.0.0.1:{server.getsockname()[1]}") == "127.0.0.1"


def test_a_token_is_new_for_every_ray_and_its_owners_alone(tmp_path):
    with bootstrap._new_token(tmp_path) as path:
        first = path.read_text()
    assert not path.exists(), "it is gone with the Ray that it was made for"
    with bootstrap._new_token(tmp_path) as path:
        assert (len(path.read_text()), path.read_text() == first) == (64, False)
        assert path.stat().st_mode & 0o077 == 0


def test_the_object_store_has_room_for_what_is_wanted_and_leaves_memory_for_the_rest():
    all_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert bootstrap.store_capacity(0) == 128 * 2**20
    assert bootstrap.store_capacity(129 * 2**20) == 129 * 2**20
    assert bootstrap.store_capacity(10 * all_bytes) == int(0.3 * all_bytes)


@pytest.fixture(autouse=True)
def sigterm_as_before():
    """What a test has it do is over with the test: whatever is started later would inherit it."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Refused(Exception):
    """As Ray says that a token is wrong."""


def fake_ray(monkeypatch, *, connected_to=None, fails=None):
    """A library that is connected so, or fails so."""

    def init(**settings):
        calls.append(settings["address"])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the real one, which has a handler of its own
        if fails is not None:
            raise fails

    calls = []
    ray = SimpleNamespace(
        init=init,
        shutdown=lambda: calls.append("shutdown"),
        is_initialized=lambda: connected_to is not None,
        exceptions=SimpleNamespace(AuthenticationError=Refused),
        get_runtime_context=lambda: SimpleNamespace(gcs_address=connected_to),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray, calls


@pytest.fixture
def somebody():
    """An address at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_an_error_of_the_run_is_not_taken_for_one_of_joining(monkeypatch, somebody):
    _, calls = fake_ray(monkeypatch)
    with pytest.raises(ConnectionResetError, match="my own data"), bootstrap.cluster(somebody):
        raise ConnectionResetError("of my own data server")
    assert calls == [somebody, "shutdown"]


@pytest.mark.parametrize("error", [ConnectionError("no"), Refused("another token. It is")])
def test_a_cluster_that_cannot_be_joined_is_refused_with_advice(monkeypatch, somebody, error):
    fake_ray(monkeypatch, fails=error)
    with (
        pytest.raises(ConfigError, match=r"could not be joined there \((no|another token)\).*its token is in"),
        bootstrap.cluster(somebody),
    ):
        pass


def test_a_process_that_is_connected_elsewhere_is_not_taken_to_be_where_it_was_told_to_go(monkeypatch):
    ray, calls = fake_ray(monkeypatch, connected_to="10.0.0.1:6379")
    with bootstrap.cluster("10.0.0.1:6379") as found:
        assert found is ray
    with pytest.raises(ConfigError, match=r"--ray-address 10.0.0.2:1: .* already connected to Ray at 10.0.0.1:6379"):
        bootstrap.cluster("10.0.0.2:1").__enter__()
    assert calls == [], "what was connected before stays so"


def test_who_ends_a_process_by_sigterm_is_heard_by_the_program_and_not_by_ray(monkeypatch, somebody):
    fake_ray(monkeypatch)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with bootstrap.cluster(somebody):
            assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_each_ray_of_our_own_is_met_with_its_own_token(tmp_path):
    text = """if True:
        import os, pathlib, sys
        from atoll.engines.ray import bootstrap
        os.environ.update(bootstrap._LOCAL)
        for name in ("first", "second"):
            pathlib.Path(name).write_text(name * 8)
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(pathlib.Path(name).absolute())
            bootstrap._reload_token()
            import ray._raylet as inside
            print(inside.AuthenticationTokenLoader.instance().get_token_for_http_header())
    """
    done = subprocess.run([sys.executable, "-c", text], check=True, timeout=60, cwd=tmp_path, capture_output=True, text=True)
    first, second = done.stdout.splitlines()
    assert "firstfirst" in first
    assert "secondsecond" in second


def test_the_environment_is_left_as_it_was(monkeypatch):
    monkeypatch.setenv("ATOLL_TEST_KEPT", "before")
    monkeypatch.delenv("ATOLL_TEST_NEW", raising=False)
    with bootstrap._environment({"ATOLL_TEST_KEPT": "during", "ATOLL_TEST_NEW": "x"}):
        assert (os.environ["ATOLL_TEST_KEPT"], os.environ["ATOLL_TEST_NEW"]) == ("during", "x")
    assert (os.environ["ATOLL_TEST_KEPT"], "ATOLL_TEST_NEW" in os.environ) == ("before", False)
