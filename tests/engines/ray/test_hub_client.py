"""Calling a hub that dies or hangs."""

from types import SimpleNamespace

import pytest

from atoll.core.errors import ExchangeFailed
from atoll.engines.ray.hub_client import HubClient


class Gone(Exception):
    """Ray's error for a dead actor."""


class TimedOut(Exception):
    """Ray's error for a timeout."""


@pytest.fixture(autouse=True)
def retries_at_once(monkeypatch):
    monkeypatch.setattr("atoll.engines.ray.hub_client._RETRY_S", 0.0)


def client_of(answers, timeout_s=5.0, watch=None):
    """A client of a hub with these replies, and what the client logs."""
    answers, logged, waits, reported = iter(answers), [], [], []

    def get(answer, timeout):
        waits.append(timeout)
        if isinstance(answer, list):  # a slow reply
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    class Broken(Gone):
        actor_init_failed = True

    errors = SimpleNamespace(RayActorError=Gone, ObjectLostError=Gone, OutOfMemoryError=Gone, GetTimeoutError=TimedOut)
    hub = SimpleNamespace(status=SimpleNamespace(remote=lambda *arguments: next(answers)))
    hub.weights_lost = SimpleNamespace(remote=reported.append)
    hub.ping = SimpleNamespace(remote=lambda: next(answers))
    client = HubClient(SimpleNamespace(get=get, exceptions=errors), hub, timeout_s=timeout_s, log=logged.append, watch=watch)
    client.waits, client.reported = waits, reported
    return client, logged, Broken


def test_a_restarting_hub_is_called_again_and_the_wait_is_logged_once():
    client, logged, _ = client_of([Gone("away"), Gone("away"), 7])
    assert client.call("status") == 7
    assert [line.split(" (")[0].split(", ")[0] for line in logged] == ["the hub does not reply", "the hub replies again"]


def test_a_dead_hub_fails_after_the_timeout():
    client, _, _ = client_of([Gone("away")] * 9, timeout_s=1e-9)
    with pytest.raises(
        ExchangeFailed, match=r"has not replied .* \(engine.hub_timeout_s=1e-09\): away Saved checkpoints are valid"
    ):
        client.call("status")


def test_a_hub_that_cannot_start_fails_at_once():
    client, logged, broken = client_of([])
    client.hub.status.remote = lambda: broken("Traceback ...\nValueError: no such thing")
    with pytest.raises(ExchangeFailed, match=r"the hub could not start: ValueError: no such thing"):
        client.call("status")
    assert logged == []


def test_a_hanging_hub_is_called_once_and_fails_after_the_timeout():
    client, logged, _ = client_of([[TimedOut("nothing yet"), TimedOut("nothing yet"), 7]])
    assert client.call("status") == 7, "the first call was answered in the end"
    assert "the hub does not reply (status: TimedOut)" in logged[0]
    assert all(0 < wait_s <= 5.0 for wait_s in client.waits)
    client, _, _ = client_of([[TimedOut("nothing yet")] * 9], timeout_s=1e-9)
    with pytest.raises(ExchangeFailed, match=r"has not replied .* \(engine.hub_timeout_s=1e-09\)"):
        client.call("status")


def test_while_a_call_waits_the_cluster_is_watched():
    seen = []

    def watch():
        seen.append(len(seen))
        if len(seen) == 4:
            raise ExchangeFailed("the head has died")

    client, logged, _ = client_of([[TimedOut("nothing yet")] * 9], watch=watch)
    with pytest.raises(ExchangeFailed, match="the head has died"):
        client.call("status")
    assert (len(seen), logged) == (4, [])
    assert all(wait_s <= 1.0 for wait_s in client.waits)


def test_a_call_waits_at_the_hub_for_less_than_the_timeout():
    client, _, _ = client_of([], timeout_s=4.0)
    assert (client.wait_s(0.5), client.wait_s(5.0)) == (0.5, 2.0)


def test_lost_weights_are_reported_to_the_hub():
    client, logged, _ = client_of([])
    assert client.fetch(("bits",)) == "bits"
    error = Gone("with its owner")
    assert client.fetch((error,)) is None
    assert client.reported == [(error,)]
    assert "weights are lost" in logged[0]


def test_a_slow_transfer_may_take_longer_than_the_timeout_while_the_hub_replies():
    client, logged, _ = client_of([None] * 3, timeout_s=1e-9)
    assert client.fetch(([TimedOut("on its way")] * 3 + ["bits"],)) == "bits"
    assert client.reported == []
    assert ["still fetching weights" in line for line in logged] == [True] * 3


def test_a_transfer_fails_if_the_hub_hangs():
    client, _, _ = client_of([TimedOut("stopped")], timeout_s=1e-9)
    with pytest.raises(ExchangeFailed, match=r"the hub has not replied .* \(engine.hub_timeout_s=1e-09\)"):
        client.fetch(([TimedOut("on its way")] * 9,))
