"""What peers report about a rank that has ended."""

import re
import signal

from torch.distributed import HashStore

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.engines.liveness import FailureAttribution, recorded_exit_reason
from atoll.engines.point_to_point import PeerUnreachable
from tests.process_pool import context_of, outcomes, sum_until_killed


def test_peers_can_read_why_a_rank_ended():
    store = HashStore()
    peer = FailureAttribution(store, 0, [0, 2])
    assert peer.exit_reason(1) == ""
    for error in (ConfigError("the disk\n  is full."), KeyError("w")):
        try:
            with recorded_exit_reason(store, 2, 4):
                raise error
        except (ConfigError, KeyError):
            pass
        assert peer.exit_reason(1) == {ConfigError: "the disk is full.", KeyError: "KeyError: 'w'"}[type(error)]


def test_a_rank_that_misses_a_peer_records_no_reason():
    store = HashStore()
    try:
        with recorded_exit_reason(store, 1, 2):
            raise ExchangeFailed("rank 0 is missing")
    except ExchangeFailed:
        pass
    assert FailureAttribution(store, 0, [0, 1]).exit_reason(1) == ""


def ending(group):
    """Rank 1 fails with a full disk, and rank 0 misses it."""
    context = context_of(group)
    if not context.is_rank_zero:
        with recorded_exit_reason(context.store, context.rank, context.size):
            raise ConfigError("the disk is full.")
    context.barrier()


def test_a_missing_rank_is_named_with_its_exit_reason():
    (code, error), (other, _) = outcomes(2, ending)
    assert (code, other) == (0, 1)
    assert "rank 1: it has ended, with: the disk is full. What was saved before this round is valid." in str(error)


def test_a_closed_connection_is_distinguished_from_a_silent_one():
    (_, error), (code, _) = outcomes(2, sum_until_killed, 1, 20.0)
    assert code == -signal.SIGKILL
    assert re.match(
        r"rank 0 could not (send to|receive from) rank 1: it has closed its connection, so it has ended\. What", str(error)
    )
    assert "GLHF" not in str(error)
    assert ".cc:" not in str(error)
    assert PeerUnreachable(1, "receive from", "[/gloo/pair.cc:5] Timed out waiting 300ms for recv operation to complete").timed_out
    assert not PeerUnreachable(1, "receive from", "[/gloo/pair.cc:5] Connection closed by peer [127.0.0.1]:1. Good luck!").timed_out
