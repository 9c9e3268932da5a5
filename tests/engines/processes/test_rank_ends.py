"""What is said of a rank that ended: for a reason of its own, without a word, or not at all."""

import re
import signal

from torch.distributed import HashStore

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.engines.liveness import FailureAttribution
from atoll.engines.processes.rank_log import telling_why
from atoll.engines.processes.transport import PeerUnreachable
from atoll.testing.processes import context_of, outcomes, sum_until_killed


def test_what_a_rank_ended_with_can_be_read_by_those_who_miss_it():
    store = HashStore()
    others = FailureAttribution(store, 0, [0, 2])
    assert others.exit_reason(1) == ""
    for error in (ConfigError("the disk\n  is full."), KeyError("w")):
        try:
            with telling_why(store, 2, 4):
                raise error
        except (ConfigError, KeyError):
            pass
        assert others.exit_reason(1) == {ConfigError: "the disk is full.", KeyError: "KeyError: 'w'"}[type(error)]


def test_who_ends_because_another_is_missing_says_nothing_of_its_own():
    store = HashStore()
    try:
        with telling_why(store, 1, 2):
            raise ExchangeFailed("rank 0 is missing")
    except ExchangeFailed:
        pass
    assert FailureAttribution(store, 0, [0, 1]).exit_reason(1) == ""


def ending(group):
    """Rank 1 finds that its disk is full; what rank 0 says then."""
    world = context_of(group)
    if not world.is_rank_zero:
        with telling_why(world.store, world.rank, world.size):
            raise ConfigError("the disk is full.")
    world.barrier()


def test_a_rank_that_is_missed_is_named_with_its_reason():
    (code, error), (other, _) = outcomes(2, ending)
    assert (code, other) == (0, 1)
    assert "rank 1: it has ended, with: the disk is full. What was saved before this round is valid." in str(error)


def test_a_connection_that_was_closed_is_told_from_one_that_was_silent():
    (_, error), (code, _) = outcomes(2, sum_until_killed, 1, 20.0)
    assert code == -signal.SIGKILL
    assert re.match(
        r"rank 0 could not (send to|hear from) rank 1: it has closed its connection, so it has ended\. What", str(error)
    )
    assert "GLHF" not in str(error)
    assert ".cc:" not in str(error)
    assert PeerUnreachable(1, "hear from", "[/gloo/pair.cc:5] Timed out waiting 300ms for recv operation to complete").timed_out
    assert not PeerUnreachable(1, "hear from", "[/gloo/pair.cc:5] Connection closed by peer [127.0.0.1]:1. Good luck!").timed_out
