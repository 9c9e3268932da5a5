"""A mean is committed only by islands that received the same from all members: a bit damaged on the way never reaches a commit."""

import json
import math
import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from atoll.core.flat_tree import Tree
from atoll.engines.accounting import ComputeSpan
from atoll.engines.elastic.aggregation import DeltaSummary, IslandReport, Proposal, UpdateValidator, ValidatedMean
from atoll.engines.elastic.commit import CommitProtocol
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.quorum import Member, Quorum
from atoll.engines.elastic.snapshot_server import IslandStatus
from atoll.engines.elastic.state_version import StateVersion
from atoll.engines.liveness import ExchangeTimeout
from atoll.engines.round_record import DeltaSimilarity, ExchangeRecord, RoundRecord, WallClock

NAMES, NOW = ("a", "b"), StateVersion(3, 7)
WORKING = frozenset(NAMES)
STATE, DELTA_SUMMARY, LENGTH, TEXT, VOTE = range(5)
"""An island's control messages of one round, in order."""
DELTA = torch.tensor([1.0, 5.0, 2.0, 4.0])
MEAN = (64 * DELTA + 128 * 2 * DELTA) / 192


class Link:
    """Two islands' messages, in memory."""

    def __init__(self):
        self.queues = {(one, other): queue.Queue() for one in (0, 1) for other in (0, 1)}

    def close(self):
        for messages in self.queues.values():
            messages.put(None)


class Group:
    """One end of a link. One of its control messages is damaged."""

    def __init__(self, link, rank, damage=None, message=None):
        self._link, self._rank, self._damage, self._message, self._sent_messages = link, rank, damage, message, 0

    def rank(self):
        return self._rank

    def size(self):
        return 2

    def send(self, tensors, rank, tag):
        sent = tensors[0].clone()
        if sent.dtype in (torch.float64, torch.uint8):
            if self._sent_messages == self._message:
                self._damage(sent)
            self._sent_messages += 1
        self._link.queues[self._rank, rank].put(sent)
        return Sent()

    def recv(self, tensors, rank, tag):
        return Received(self._link.queues[rank, self._rank], tensors[0])


class Sent:
    def wait(self, limit):
        return True


class Received:
    """A pending receive into this tensor."""

    def __init__(self, messages, into):
        self._messages, self._into = messages, into

    def wait(self, limit):
        sent = self._messages.get(timeout=20.0)
        if sent is None or sent.numel() != self._into.numel():
            raise RuntimeError("connection closed by peer")
        self._into.copy_(sent)


class Once(Exception):
    """The attempt has failed, and is not repeated."""


class Finder:
    """Forms the quorum of the two islands, once."""

    def __init__(self, link, group):
        self._link, self._group, self.found = link, group, False

    def form_quorum(self, version, failures):
        if self.found:
            raise Once
        self.found = True
        members = tuple(Member(name, "127.0.0.1:1", True, 0.0) for name in NAMES)
        return Quorum(members, self._group.rank(), "", connected=True)

    network = DirectNetwork("")

    def connect(self, quorum, limit_s):
        return self._group

    def query(self, name, address, limit_s):
        return None

    def abort(self):
        self._link.close()


def protocol_of(rank, finder):
    status = IslandStatus(NAMES[rank], True, f"address-{rank}")
    mean = ValidatedMean(UpdateValidator(10.0), WallClock())
    return CommitProtocol(finder, mean, status, ExchangeTimeout(20.0), lambda text: None, patience_s=20.0), status


def round_of(rank, link, group, **proposed):
    """One island's round: its commit, or how it failed; and its suspects."""
    protocol, status = protocol_of(rank, Finder(link, group))
    report = IslandReport("run", status.address)
    brought = {"weight": 64.0 * (rank + 1), "working": WORKING, **proposed}
    try:
        return protocol.commit(Proposal(NOW, 1, report, Tree.of({"w": DELTA * (rank + 1)}), **brought)), status.suspects
    except Once as error:
        return error, status.suspects


def exchange_of_two(damage=None, message=None, **proposed):
    link = Link()
    groups = [Group(link, 0, damage, message), Group(link, 1)]
    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(lambda rank: round_of(rank, link, groups[rank], **proposed), (0, 1))]


def flips(bit):
    def flip(tensor):
        tensor.view(torch.uint8)[bit // 8] ^= 1 << bit % 8

    return flip


def test_two_islands_agree_on_the_mean_by_weight():
    for commit, suspects in exchange_of_two():
        assert torch.equal(commit.result.value.flat, MEAN)
        assert [report.address for report in commit.result.reports] == ["address-0", "address-1"]
        for report in commit.result.reports:
            (exchange,) = report.record.exchanges
            assert exchange.arrived_s == 0.0 < exchange.start_s < exchange.end_s, "the quorum was found in between"
        assert not suspects


class Counting(Group):
    """Counts the bytes of control messages."""

    control_bytes_sent = 0

    def send(self, tensors, rank, tag):
        self.control_bytes_sent += tensors[0].nbytes if tensors[0].dtype != torch.float32 else 0
        return super().send(tensors, rank, tag)


def two_rounds(rank, link, group):
    """Control bytes that one island reports of each of two rounds, and those that it sent in the first."""
    finder = Finder(link, group)
    protocol, status = protocol_of(rank, finder)
    reported, sent = [], []
    for _ in range(2):
        commit = protocol.commit(Proposal(NOW, 1, IslandReport("run", status.address), Tree.of({"w": DELTA}), 64.0, WORKING))
        reported.append(commit.result.reports[rank].record.exchanges[0].control_bytes)
        sent.append(group.control_bytes_sent)
        finder.found = False
    return reported, sent[0]


def test_the_bytes_of_a_vote_are_reported_with_the_next_round():
    link = Link()
    with ThreadPoolExecutor(2) as pool:
        for (first, second), sent in pool.map(two_rounds, (0, 1), (link, link), [Counting(link, 0), Counting(link, 1)]):
            assert first < second == sent  # both rounds send as much before their votes


SPAN = ComputeSpan(0.0, 1.0, 2, 2.0, [1.5], 16)
EXCHANGE = ExchangeRecord("mean", 1.0, 2.0, 16, 16, 192.0, background=False, start_s=1.5)
SIMILAR = DeltaSimilarity([[1.0, 2.0], [2.0, 4.0]], [64.0, 128.0])
WHOLE = json.loads(IslandReport("run", "x:1", record=RoundRecord([SPAN], [EXCHANGE], similarities=[SIMILAR])).to_text())
RECORD = json.loads(WHOLE[5])


def with_record(**changed):
    return [*WHOLE[:5], json.dumps({**RECORD, **changed}), WHOLE[6]]


def with_exchange(**changed):
    return with_record(exchanges=[{**RECORD["exchanges"][0], **changed}])


MALFORMED = [
    5,
    [],
    WHOLE[1:],
    *([*WHOLE[:at], {}, *WHOLE[at + 1 :]] for at in range(len(WHOLE))),
    *([*WHOLE[:5], record, WHOLE[6]] for record in ("", "5", "{}")),
    *([*WHOLE[:6], now_s] for now_s in (math.nan, math.inf)),
    *(with_record(**{name: 5}) for name in ("computed", "exchanges", "similarities", "unknown")),
    *(with_record(tokens=tokens) for tokens in ("many", math.nan, 10**400)),
    *(with_record(computed=[[0.0, 1.0, 2, 2.0, losses, 16, True]]) for losses in (["x"], [])),
    with_record(computed=[[math.nan, *RECORD["computed"][0][1:]]]),
    with_record(exchanges=[]),
    with_record(exchanges=2 * RECORD["exchanges"]),
    with_record(similarities=[]),
    *(with_exchange(**{name: value}) for name in ("arrived_s", "start_s", "end_s") for value in ("x", math.nan, math.inf)),
    *(with_exchange(nonfinite=ranks) for ranks in (["x"], [2], [-1], [0.0])),
    *(
        with_record(similarities=[{"products": products, "weights": SIMILAR.weights}])
        for products in ([], [[1.0, 2.0]], [[1.0], [2.0]], [[1.0, 2.0], [2.0, -4.0]], [[1.0, 2.0], [2.0, 10**400]])
    ),
    with_record(similarities=[{"products": SIMILAR.products, "weights": [0.0, 0.0]}]),
]


def exchange_of_reports(monkeypatch, sent):
    """One island reports what is `sent`."""
    monkeypatch.setattr(IslandReport, "to_text", lambda self: json.dumps(WHOLE if self.address == "address-1" else sent))
    return exchange_of_two(compare=True)


def test_a_report_of_a_delta_commit_is_whole(monkeypatch):
    for commit, suspects in exchange_of_reports(monkeypatch, WHOLE):
        assert [report.record.exchanges for report in commit.result.reports] == [[replace(EXCHANGE, nonfinite=[])]] * 2
        assert not suspects


@pytest.mark.parametrize("sent", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_report_fails_an_attempt_and_names_its_island(monkeypatch, sent):
    for failed, suspects in exchange_of_reports(monkeypatch, sent):
        assert isinstance(failed, Once)
        assert suspects == {"a"}


@pytest.mark.parametrize(
    ("message", "number", "bit"),
    [
        (STATE, 0, 0),
        (STATE, 3, 51),  # the epoch that the attempt would take
        (STATE, 3, 57),  # the same, beyond the bits of an epoch
        (STATE, 5, 62),  # 1 becomes infinity
        (DELTA_SUMMARY, 0, 51),  # its weight
        (DELTA_SUMMARY, 0, 62),
        (DELTA_SUMMARY, 2, 60),  # its norm: the receiver rejects the delta
        (DELTA_SUMMARY, 4, 0),  # the checksum of its slice
        (LENGTH, 0, 62),
        (TEXT, 0, 3),
        (TEXT, 1, 7),  # no text
        (TEXT, 2, 40),
    ],
)
def test_no_island_commits_when_a_bit_of_a_control_message_is_damaged(message, number, bit):
    for failed, _ in exchange_of_two(flips(64 * number + bit), message):
        assert isinstance(failed, Once)


@pytest.mark.parametrize(("number", "bit"), [(1, 57), (3, 57), (3, 60), (3, 40), (0, 63)])
def test_an_impossible_round_or_epoch_is_not_kept_for_the_next_attempt(number, bit):
    assert [suspects for _, suspects in exchange_of_two(flips(64 * number + bit), STATE)][1] == {"a"}


@pytest.mark.parametrize("message", [STATE, DELTA_SUMMARY, TEXT])
def test_both_ends_of_a_damaging_link_suspect_each_other(message):
    assert [suspects for _, suspects in exchange_of_two(flips(0), message)] == [{"b"}, {"a"}]


def test_the_receiver_of_a_damaged_vote_does_not_commit_and_its_sender_has_the_right_mean():
    (commit, _), (failed, _) = exchange_of_two(flips(20), VOTE)
    assert torch.equal(commit.result.value.flat, MEAN)
    assert isinstance(failed, Once)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -8.0])
def test_two_islands_commit_without_deltas_of_impossible_weights(weight):
    for commit, suspects in exchange_of_two(weight=weight):
        assert set(commit.result.rejected) == {0, 1}
        assert (commit.delivered, commit.result.weight, suspects) == ([], 0.0, frozenset())
        assert not commit.result.value.flat.any()


def test_the_weight_of_an_island_without_work_does_not_count():
    for commit, _ in exchange_of_two(working=frozenset("a")):
        assert torch.equal(commit.result.value.flat, DELTA)
        assert (commit.delivered, commit.result.rejected) == (["a"], {})


SOUND = DeltaSummary(1.0, True, 2.0)


@pytest.mark.parametrize("weight", [math.nan, math.inf, 1e300, 100.5, -8.0, -math.inf])
def test_a_weight_that_no_delta_of_the_run_can_have_is_rejected_and_no_other_one(weight):
    validator, false = UpdateValidator(10, most_weight=100.0), DeltaSummary(weight, True, 2.0)
    (reason,) = validator.rejections([SOUND, false, DeltaSummary(100.0, True, 2.0)]).values()
    assert reason == f"its weight is {weight:g}, and a delta of this run has one of 0 to 100"
    validator.record([SOUND, false], rejected=[1])
    assert validator.to_parts() == {"norms": [2.0]}


@pytest.mark.parametrize("norm", [math.nan, math.inf, -2.0])
@pytest.mark.parametrize("limit", [10, math.inf])
def test_a_norm_that_is_none_is_rejected_and_makes_no_other_norm_too_large(norm, limit):
    deltas = [SOUND, DeltaSummary(1.0, True, norm), SOUND, SOUND]
    assert UpdateValidator(limit).rejections(deltas) == {1: f"its delta has a norm of {norm:g}, which is none"}


def test_a_delta_that_is_not_finite_is_rejected_from_the_first_round_on():
    assert UpdateValidator(10).rejections([SOUND, DeltaSummary(1.0, False, 0.0)]) == {1: "its delta is not finite"}


def test_no_norm_is_too_large_before_three_are_known():
    validator = UpdateValidator(10)
    for _ in range(2):
        assert validator.rejections([SOUND, DeltaSummary(1.0, True, 1e9)]) == {}
        validator.record([SOUND], rejected={})
    validator.record([SOUND], rejected={})
    assert list(validator.rejections([SOUND, DeltaSummary(1.0, True, 20.1)])) == [1]
    assert validator.rejections([SOUND, DeltaSummary(1.0, True, 19.9)]) == {}


def test_in_the_first_rounds_three_islands_find_the_one_whose_norm_is_too_large():
    assert list(UpdateValidator(10).rejections([SOUND, DeltaSummary(1.0, True, 1e9), SOUND])) == [1]
    assert UpdateValidator(10).rejections([SOUND, DeltaSummary(1.0, True, 1e9), DeltaSummary(0.0, True, 0.0)]) == {}, (
        "two islands cannot find out"
    )


def test_zero_deltas_make_no_other_delta_too_large():
    validator = UpdateValidator(10)
    for _ in range(3):
        validator.record([DeltaSummary(1.0, True, 0.0)], rejected={})
    assert validator.rejections([SOUND]) == {}


def test_rejected_norms_are_not_remembered():
    validator, absurd = UpdateValidator(10), DeltaSummary(1.0, True, 1e6)
    for _ in range(3):
        validator.record([SOUND], rejected={})
    for _ in range(40):
        rejected = validator.rejections([SOUND, absurd])
        assert list(rejected) == [1]
        validator.record([SOUND, absurd], rejected)


def test_an_island_without_work_is_neither_rejected_nor_remembered():
    validator, idle = UpdateValidator(10), DeltaSummary(0.0, True, 0.0)
    for _ in range(5):
        validator.record([SOUND, idle], rejected={})
    assert validator.rejections([idle, SOUND]) == {}
    validator.record([idle], rejected={})
    assert validator.to_parts() == {"norms": [2.0] * 5}


def test_a_limit_of_infinity_rejects_only_what_is_not_finite():
    validator = UpdateValidator(math.inf)
    for _ in range(5):
        validator.record([SOUND], rejected={})
    assert validator.rejections([DeltaSummary(1.0, True, 1e300)]) == {}


def test_a_validator_is_restored_from_its_parts():
    validator, other = UpdateValidator(10), UpdateValidator(10)
    for norm in (1.0, 2.0, 3.0):
        validator.record([DeltaSummary(1.0, True, norm)], rejected={})
    other.from_parts(validator.to_parts())
    assert other.rejections([DeltaSummary(1.0, True, 21.0)]) == validator.rejections([DeltaSummary(1.0, True, 21.0)]) != {}
