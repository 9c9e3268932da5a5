"""A worker's process without Ray, and a hub in the same thread."""

from types import SimpleNamespace

import pytest
import torch

from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.engines.local import LocalReplica
from atoll.engines.masters import initial
from atoll.engines.ray.wire import Told, bits_of, dtype_name, tree_over
from atoll.engines.ray.worker import Worker, WorkerOrder
from atoll.errors import ConfigError, ExchangeFailed
from atoll.optim.adam import AdamW
from atoll.protocols import Work
from atoll.testing.workloads import Regression


class Gone(Exception):
    """As Ray says that an actor is away, or an object lost."""


class Made:
    """What the worker trains; counts how many replicas were made."""

    fingerprint = "data"

    def __init__(self):
        self.workload, self.count = Regression(), 0

    def replica(self, number):
        self.count += 1
        return LocalReplica(self.workload, optimizer=AdamW(lr=0.01), seed=number)


class FakeHub:
    """Answers pulls as it is told to, and remembers what it is brought."""

    def __init__(self, made, words, verdicts=(), hello=""):
        self.weights = initial(made.workload, "cpu")
        self.words, self.verdicts, self.reason = list(words), list(verdicts), hello
        self.hellos, self.pulls, self.pushed, self.begun = [], [], [], []

    def hello(self, number, life, fingerprint, about):
        self.hellos.append((number, life, fingerprint))
        return self.reason

    def pull(self, number, life, last):
        self.pulls.append(last)
        word = self.words.pop(0)
        if word not in ("go", "fresh", "lost"):
            return Told(word)
        ticket = (len(self.pulls), 1)
        bits = Gone("lost with its hub") if word == "lost" else bits_of(self.weights)
        work = Work(shard=0, start=4 * len(self.pushed), schedule=0, examples=64)
        return Told("go", ticket, 4, work, (bits,), dtype_name(self.weights), word == "fresh", 10.0)

    def began(self, number, life, ticket, begin_s):
        self.begun.append(ticket)

    def push(self, brought, bits):
        self.pushed.append((brought, bits.copy()))
        return self.verdicts.pop(0) if self.verdicts else "taken"


def worker(tmp_path, words, verdicts=(), hello="", algorithm=None):
    made = Made()
    hub = FakeHub(made, words, verdicts, hello)

    def get(found):
        if isinstance(found, Exception):
            raise found
        return found

    errors = SimpleNamespace(RayActorError=Gone, ObjectLostError=Gone, GetTimeoutError=Gone)
    ray = SimpleNamespace(get=get, put=lambda bits: bits.copy(), exceptions=errors)
    methods = {name: SimpleNamespace(remote=getattr(hub, name)) for name in ("hello", "pull", "began", "push")}
    order = WorkerOrder(
        number=2,
        life=5,
        algorithm=algorithm or AsyncLocalSGD(inner_steps=4),
        make=lambda: made,
        threads=1,
        pause_s=0.0,
        limit_s=1.0,
        log=tmp_path / "worker.log",
    )
    return Worker(order, ray, SimpleNamespace(**methods)), hub, made


def test_a_worker_pulls_trains_and_pushes_how_far_it_moved(tmp_path):
    one, hub, made = worker(tmp_path, ["wait", "go", "go", "over"])
    assert one.work() == 2
    replica = made.workload and LocalReplica(made.workload, optimizer=AdamW(lr=0.01), seed=2)
    for brought, bits in hub.pushed:
        replica.load(hub.weights)
        replica.train(4, Work(shard=0, start=4 * (brought.ticket[0] - 2), schedule=0, examples=64))
        assert tree_over(bits, hub.weights.layout, "float32").same_bits(hub.weights - replica.params())
    assert hub.hellos == [(2, 5, "data")]
    assert hub.pulls == [None, None, (2, 1), (3, 1)], "it says which round of its own was its last"
    assert hub.begun == [(2, 1), (3, 1)]
    assert made.count == 1, "and its optimizer goes on"
    first = hub.pushed[0][0]
    assert 10.0 <= first.begin_s <= first.stretches[0].start_s <= first.stretches[0].end_s <= first.pushed_s, "on the hub's clock"
    assert sum(stretch.steps for stretch in first.stretches) == 4
    assert torch.get_num_threads() == 1


def test_a_worker_whose_last_round_is_lost_or_unusable_begins_with_a_fresh_optimizer(tmp_path):
    one, _, made = worker(tmp_path, ["go", "fresh", "go", "over"], verdicts=["unknown", "refused", "taken"])
    assert one.work() == 3
    assert made.count == 3


def test_a_worker_that_nobody_knows_introduces_itself_again(tmp_path):
    one, hub, made = worker(tmp_path, ["go", "hello", "go", "replaced"], verdicts=["hello", "taken"])
    assert one.work() == 2
    assert len(hub.hellos) == 2
    assert hub.pulls[2] is None
    assert made.count == 2


def test_weights_that_are_lost_with_their_hub_are_asked_for_again(tmp_path):
    one, hub, _ = worker(tmp_path, ["lost", "go", "over"])
    assert one.work() == 1
    assert hub.pulls[:2] == [None, None]
    assert "are lost" in (tmp_path / "worker.log").read_text()


def test_a_worker_that_is_refused_says_why(tmp_path):
    one, _, _ = worker(tmp_path, [], hello="it reads other data")
    with pytest.raises(ConfigError, match="it reads other data"):
        one.work()


class NeverPushes(AsyncLocalSGD):
    async def round(self, replica, hub):
        await hub.pull()


def test_a_round_without_a_push_is_refused(tmp_path):
    one, _, _ = worker(tmp_path, ["go"], algorithm=NeverPushes(inner_steps=4))
    with pytest.raises(ExchangeFailed, match="ended without a push"):
        one.work()
