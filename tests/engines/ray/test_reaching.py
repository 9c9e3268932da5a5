"""Asking a hub that dies."""

from types import SimpleNamespace

import pytest

from atoll.engines.ray.reaching import Reach
from atoll.errors import ExchangeFailed


class Gone(Exception):
    """As Ray says that an actor is away."""


def reach(answers, limit_s=5.0):
    """A hub that answers so, one after the other, and what is said meanwhile."""
    answers, said = iter(answers), []

    def get(answer):
        if isinstance(answer, Exception):
            raise answer
        return answer

    class Broken(Gone):
        actor_init_failed = True

    errors = SimpleNamespace(RayActorError=Gone, ObjectLostError=Gone, GetTimeoutError=Gone)
    hub = SimpleNamespace(news=SimpleNamespace(remote=lambda *arguments: next(answers)))
    ray, never = SimpleNamespace(get=get, exceptions=errors), lambda seconds: None
    return Reach(ray, hub, limit_s=limit_s, say=said.append, sleep=never), said, Broken


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
