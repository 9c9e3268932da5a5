"""A worker's process without Ray, and a hub in the same thread."""

import math
from types import SimpleNamespace

import pytest
import torch

from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.core.errors import ConfigError
from atoll.core.protocols import Work
from atoll.engines.ray.messages import Told, bits_of, dtype_name, tree_over
from atoll.engines.ray.worker import Worker, WorkerOrder
from atoll.optim.adam import AdamW
from atoll.replica.local_replica import LocalReplica
from atoll.replica.master_weights import initial_weights
from atoll.testing.simulated_runs import Regression


class Gone(Exception):
    """As Ray says that an actor is away, or an object lost."""


class Silent(Exception):
    """As Ray says that an actor takes its time."""


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
        self.weights = initial_weights(made.workload, "cpu")
        self.words, self.verdicts, self.reason = list(words), list(verdicts), hello
        self.hellos, self.pulls, self.pushed, self.begun, self.asked_again = [], [], [], [], []

    def hello(self, number, life, fingerprint, about):
        self.hellos.append((number, life, fingerprint))
        return self.reason

    def pull(self, number, life, last, patience_s):
        self.pulls.append(last)
        word = self.words.pop(0)
        if word not in ("go", "fresh", "lost"):
            return Told(word)
        ticket = (len(self.pulls), 1)
        bits = Gone("lost with its hub") if word == "lost" else bits_of(self.weights)
        work = Work(shard=0, start=4 * len(self.pushed), schedule=0, examples=64)
        return Told("go", ticket, 4, work, (bits,), dtype_name(self.weights), word == "fresh", 10.0)

    def lost(self, weights):
        self.asked_again.append(weights)

    def began(self, number, life, ticket, begin_s):
        self.begun.append(ticket)

    def push(self, brought, bits):
        self.pushed.append((brought, bits.copy()))
        return self.verdicts.pop(0) if self.verdicts else "taken"


def worker(tmp_path, words, verdicts=(), hello="", algorithm=None):
    made = Made()
    hub = FakeHub(made, words, verdicts, hello)

    def get(found, timeout):
        if isinstance(found, Exception):
            raise found
        return found

    errors = SimpleNamespace(RayActorError=Gone, ObjectLostError=Gone, OutOfMemoryError=Gone, GetTimeoutError=Silent)
    ray = SimpleNamespace(get=get, put=lambda bits: bits.copy(), exceptions=errors)
    methods = {name: SimpleNamespace(remote=getattr(hub, name)) for name in ("hello", "pull", "began", "push", "lost")}
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


class Diverging(Regression):
    def loss(self, module, batch):
        return super().loss(module, batch) * float("nan")


def test_a_worker_whose_loss_is_no_number_brings_it_all_the_same_for_the_hub_to_refuse(tmp_path):
    one, hub, made = worker(tmp_path, ["go", "over"], verdicts=["refused"])
    made.workload = Diverging()
    assert one.work() == 1
    (brought, bits), *_ = hub.pushed
    assert not tree_over(bits, hub.weights.layout, "float32").is_finite()
    assert math.isnan(brought.stretches[0].loss)
    assert made.count == 2, "and begins with a fresh optimizer"


def test_what_a_worker_dies_of_is_in_its_log_or_in_rays_where_there_is_no_folder(tmp_path, capsys):
    one, _, _ = worker(tmp_path, ["go"], verdicts=["refused"], algorithm=NeverPushes(inner_steps=4))
    with pytest.raises(ConfigError):
        one.work()
    assert "NeverPushes" in (tmp_path / "worker.log").read_text()
    assert capsys.readouterr().out == ""
    worker(tmp_path / "nowhere", [])
    assert "worker 2: life 5" in capsys.readouterr().out
    assert not (tmp_path / "nowhere").exists()


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
    assert len(hub.asked_again) == 1, "a hub that lives would publish the same reference again"
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
    with pytest.raises(ConfigError, match=r"NeverPushes\.round ended without a push"):
        one.work()
