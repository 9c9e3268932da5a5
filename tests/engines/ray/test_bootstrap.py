"""Starting and joining Ray."""

import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from atoll.core.errors import ConfigError
from atoll.engines.ray import bootstrap


def test_all_modules_import_without_ray():
    names = "atoll.engines.ray.engine, atoll.engines.ray.launch, atoll.cli.main"
    text = f"import sys\nsys.modules['ray'] = None\nimport {names}\nassert sys.modules['ray'] is None"
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)


def test_missing_ray_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install -e ".*\[ray\]"'):
        bootstrap.check_installed()


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:no", "nobody.invalid:1", ":"])
def test_an_unreachable_address_is_refused(address):
    with pytest.raises(ConfigError, match=r"nothing listens there .*leave it out to start one"):
        bootstrap.check_reachable(address)


def test_a_listening_address_is_reachable():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert bootstrap.check_reachable(f"127.0.0.1:{server.getsockname()[1]}") == "127.0.0.1"


def test_each_local_ray_has_a_new_token_that_only_its_owner_reads(tmp_path):
    with bootstrap._new_token(tmp_path) as path:
        first = path.read_text()
    assert not path.exists(), "it is gone with the Ray that it was made for"
    with bootstrap._new_token(tmp_path) as path:
        assert (len(path.read_text()), path.read_text() == first) == (64, False)
        assert path.stat().st_mode & 0o077 == 0


def test_the_capacity_of_the_object_store_is_limited():
    all_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert bootstrap.store_capacity(0) == 128 * 2**20
    assert bootstrap.store_capacity(129 * 2**20) == 129 * 2**20
    assert bootstrap.store_capacity(10 * all_bytes) == int(0.3 * all_bytes)


@pytest.fixture(autouse=True)
def restored_sigterm_handler():
    """Later processes would inherit a handler that a test has set."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Refused(Exception):
    """Raises as Ray does for a wrong token."""


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
def address():
    """An address with a listening socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_an_error_of_the_run_is_not_reported_as_a_failed_join(monkeypatch, address):
    _, calls = fake_ray(monkeypatch)
    with pytest.raises(ConnectionResetError, match="my own data"), bootstrap.cluster(address):
        raise ConnectionResetError("of my own data server")
    assert calls == [address, "shutdown"]


@pytest.mark.parametrize("error", [ConnectionError("no"), Refused("another token. It is")])
def test_a_cluster_that_cannot_be_joined_is_refused(monkeypatch, address, error):
    fake_ray(monkeypatch, fails=error)
    with (
        pytest.raises(ConfigError, match=r"could not be joined there \((no|another token)\).*its token is in"),
        bootstrap.cluster(address),
    ):
        pass


def test_a_process_connected_to_another_cluster_is_refused(monkeypatch):
    ray, calls = fake_ray(monkeypatch, connected_to="10.0.0.1:6379")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with bootstrap.cluster("10.0.0.1:6379", trusted=True) as found:
        assert found is ray
    with pytest.raises(ConfigError, match=r"engine.address=10.0.0.2:1: .* already connected to Ray at 10.0.0.1:6379"):
        bootstrap.cluster("10.0.0.2:1").__enter__()
    assert calls == [], "what was connected before stays so"


BEYOND = "10.0.0.1:6379"


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("mode", ["disabled", "Disabled", "token", None])
def test_a_cluster_beyond_loopback_needs_a_trusted_network_and_authentication(monkeypatch, tmp_path, connected, mode):
    _, calls = fake_ray(monkeypatch, connected_to=BEYOND if connected else None)
    monkeypatch.setattr(bootstrap, "check_reachable", lambda address: address.rpartition(":")[0])
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    ways = [lambda trusted: bootstrap.cluster(BEYOND, trusted=trusted)]
    if connected:
        ways.append(lambda trusted: bootstrap.own_ray(cpus=1, gpus=0, store_bytes=1, folder=tmp_path, trusted=trusted))
    for way in ways:
        with pytest.raises(ConfigError, match=r"Ray at 10\.0\.0\.1:6379: .*give --set engine\.network=trusted"), way(False):
            pass
        # Without the variable, atoll connects with a token, and Ray by itself without authentication.
        if mode == "token" or (mode is None and not connected):
            with way(True):
                pass
        else:
            with pytest.raises(
                ConfigError, match=r"Ray at .*: without authentication .*Start the cluster with RAY_AUTH_MODE=token"
            ):
                way(True).__enter__()
    assert calls == ([BEYOND, "shutdown"] if not connected and mode in ("token", None) else [])


def test_the_programs_sigterm_handler_stays(monkeypatch, address):
    fake_ray(monkeypatch)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with bootstrap.cluster(address):
            assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_each_local_ray_uses_its_own_token(tmp_path):
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
