"""Asking a hub that dies."""

from types import SimpleNamespace

import pytest

from atoll.core.errors import ExchangeFailed
from atoll.engines.ray.hub_client import Reach


class Gone(Exception):
    """As Ray says that an actor is away."""


class Silent(Exception):
    """As Ray says that an answer has not come in time."""


def reach(answers, limit_s=5.0):
    """A hub that answers so, one after the other, and what is said meanwhile."""
    answers, said, waits, told = iter(answers), [], [], []

    def get(answer, timeout):
        waits.append(timeout)
        if isinstance(answer, list):  # takes its time
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    class Broken(Gone):
        actor_init_failed = True

    errors = SimpleNamespace(RayActorError=Gone, ObjectLostError=Gone, OutOfMemoryError=Gone, GetTimeoutError=Silent)
    hub = SimpleNamespace(news=SimpleNamespace(remote=lambda *arguments: next(answers)))
    hub.lost = SimpleNamespace(remote=told.append)
    hub.present = SimpleNamespace(remote=lambda: next(answers))
    ray, never = SimpleNamespace(get=get, exceptions=errors), lambda seconds: None
    one = Reach(ray, hub, limit_s=limit_s, say=said.append, sleep=never)
    one.waits, one.told = waits, told
    return one, said, Broken


def test_a_hub_that_is_away_is_waited_for_and_that_is_said_once():
    one, said, _ = reach([Gone("away"), Gone("away"), 7])
    assert one.ask("news") == 7
    assert [line.split(" (")[0].split(", ")[0] for line in said] == ["the hub does not answer", "the hub answers again"]


def test_it_is_given_up_when_the_limit_is_over():
    one, _, _ = reach([Gone("away")] * 9, limit_s=1e-9)
    with pytest.raises(ExchangeFailed, match=r"has not answered .* \(limit 1e-09 s, --limit\): away What was saved stands"):
        one.ask("news")


def test_a_hub_that_cannot_begin_is_not_waited_for():
    one, said, broken = reach([])
    one.hub.news.remote = lambda: broken("Traceback ...\nValueError: no such thing")
    with pytest.raises(ExchangeFailed, match=r"the hub could not go on: ValueError: no such thing"):
        one.ask("news")
    assert said == []


def test_a_hub_that_lives_and_is_silent_is_asked_once_and_waited_for_no_longer_than_the_limit():
    one, said, _ = reach([[Silent("nothing yet"), Silent("nothing yet"), 7]])
    assert one.ask("news") == 7, "the same question was answered in the end"
    assert "the hub does not answer (news: Silent)" in said[0]
    assert all(0 < wait_s <= 5.0 for wait_s in one.waits)
    one, _, _ = reach([[Silent("nothing yet")] * 9], limit_s=1e-9)
    with pytest.raises(ExchangeFailed, match=r"has not answered .* \(limit 1e-09 s, --limit\)"):
        one.ask("news")


def test_whoever_may_wait_at_the_hub_waits_less_than_the_limit():
    one, _, _ = reach([], limit_s=4.0)
    assert (one.patience_s(0.5), one.patience_s(5.0)) == (0.5, 2.0)


def test_weights_that_are_lost_are_asked_for_again():
    one, said, _ = reach([])
    assert one.fetch(("bits",)) == "bits"
    error = Gone("with its owner")
    assert one.fetch((error,)) is None
    assert one.told == [(error,)]
    assert "weights are lost" in said[0]


def test_weights_that_take_longer_than_the_limit_are_not_lost_as_long_as_the_hub_is_there():
    one, said, _ = reach([None] * 3, limit_s=1e-9)
    assert one.fetch(([Silent("on its way")] * 3 + ["bits"],)) == "bits"
    assert one.told == []
    assert ["weights have been on their way" in line for line in said] == [True] * 3


def test_weights_are_not_waited_for_when_the_hub_is_silent_too():
    one, _, _ = reach([Silent("stopped")], limit_s=1e-9)
    with pytest.raises(ExchangeFailed, match=r"the hub has not answered .* \(limit 1e-09 s, --limit\)"):
        one.fetch(([Silent("on its way")] * 9,))
