"""The worker process without Ray, and a hub in the same thread."""

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from atoll import recipes
from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Work
from atoll.engines.ray.messages import TaskMessage, dtype_name, tree_bytes, tree_view
from atoll.engines.ray.spec import Ray
from atoll.engines.ray.worker import WorkerProcess, WorkerProcessSpec
from atoll.engines.training_setup import replica_of
from atoll.engines.warm_start_training import load_data
from atoll.optim.adam import AdamW
from atoll.optim.codecs import CODECS
from atoll.replica.local_replica import LocalReplica
from atoll.replica.master_weights import initial_weights
from atoll.runs.run_settings import Train, candidates
from atoll.runs.workloads import data_fingerprint
from atoll.testing.simulated_runs import Regression


class Gone(Exception):
    """Ray's error for a dead actor or a lost object."""


class TimedOut(Exception):
    """Ray's error for a timeout."""


class FakeHub:
    """Replies to pulls with given statuses, and records pushes."""

    def __init__(self, statuses, replies=(), refusal=""):
        self.weights = initial_weights(Regression(), "cpu")
        self.statuses, self.replies, self.reason = list(statuses), list(replies), refusal
        self.registrations, self.pulls, self.pushed, self.started, self.asked_again = [], [], [], [], []

    def register(self, worker, incarnation, fingerprint, about):
        self.registrations.append((worker, incarnation, fingerprint))
        return self.reason

    def pull(self, worker, incarnation, last, patience_s):
        self.pulls.append(last)
        status = self.statuses.pop(0)
        if status not in ("train", "fresh", "lost"):
            return TaskMessage(status)
        ticket = (len(self.pulls), 1)
        bits = Gone("lost with its hub") if status == "lost" else tree_bytes(self.weights)
        work = Work(shard=0, start=4 * len(self.pushed), schedule=0, examples=64)
        return TaskMessage("train", ticket, 4, work, (bits,), dtype_name(self.weights), status == "fresh", 10.0)

    def weights_lost(self, weights):
        self.asked_again.append(weights)

    def round_started(self, worker, incarnation, ticket, begin_s):
        self.started.append(ticket)

    def push(self, update, bits):
        self.pushed.append((update, bits.copy()))
        return self.replies.pop(0) if self.replies else "accepted"


def worker(tmp_path, statuses, replies=(), refusal="", algorithm=None, workload=None, run=None, devices=1, code=""):
    """A worker, of a run of its own data, on `workload`, or of a user's loop, and its hub."""
    hub = FakeHub(statuses, replies, refusal)

    def get(found, timeout):
        if isinstance(found, Exception):
            raise found
        return found

    errors = SimpleNamespace(RayActorError=Gone, ObjectLostError=Gone, OutOfMemoryError=Gone, GetTimeoutError=TimedOut)
    ray = SimpleNamespace(get=get, put=lambda bits: bits.copy(), exceptions=errors)
    methods = {
        name: SimpleNamespace(remote=getattr(hub, name)) for name in ("register", "pull", "round_started", "push", "weights_lost")
    }
    if run is None:
        algorithm, train = algorithm or AsyncLocalSGD(inner_steps=4), Train(steps=8, batch_size=1, clip_norm=None, compile=False)
        run = replace(recipes.toy_async(), algorithm=algorithm, optimizer=AdamW(lr=0.01), train=train)
        workload = workload or Regression()
    engine = Ray(hub_timeout_s=1.0, devices=devices)
    shared = {"run": run, "engine": engine, "gpus": 0.0, "workload": workload, "weights": (), "logs": tmp_path}
    spec = WorkerProcessSpec(**shared, code=code, worker=2, incarnation=5)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("atoll.engines.ray.bootstrap.library", lambda: ray)
        return WorkerProcess(spec, SimpleNamespace(**methods)), hub


@pytest.fixture
def replicas(monkeypatch):
    """The replicas that the worker has made."""
    made = []
    monkeypatch.setattr("atoll.engines.ray.worker.replica_of", lambda *args, **kw: made.append(replica_of(*args, **kw)) or made[-1])
    return made


class Diverging(Regression):
    def loss(self, module, batch):
        return super().loss(module, batch) * float("nan")


LOOP = """
import torch
import atoll
from atoll.testing.simulated_runs import Regression

def train(member):
    model = Regression().module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with atoll.run_islands(member, model, optimizer) as islands:
        for shard, position in islands.batches():
            loss = Regression().loss(model, Regression().batches.batch(shard, position))
            islands.log(loss.item(), 8)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def test_a_users_loop_trains_and_the_worker_pushes_what_it_moved(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "async_loop.py").write_text(LOOP)
    one, hub = worker(tmp_path, ["train", "train", "finished"], code=f"{tmp_path}/async_loop.py:train")
    try:
        assert one.work() == 2
    finally:
        del sys.modules["async_loop"]
    for round_, (update, bits) in enumerate(hub.pushed):
        model = Regression().module()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for position in range(4 * round_, 4 * round_ + 4):
            optimizer.zero_grad()
            Regression().loss(model, Regression().batches.batch(0, position)).backward()
            optimizer.step()
        assert tree_view(bits, hub.weights.layout, "float32").equal(hub.weights - Tree.of(model))
        assert (update.computed[0].steps, update.computed[0].tokens) == (4, 32)
        assert math.isfinite(update.computed[0].loss)


def test_a_worker_pushes_an_update_that_is_not_finite_for_the_hub_to_refuse(tmp_path, replicas):
    one, hub = worker(tmp_path, ["train", "finished"], replies=["refused"], workload=Diverging())
    assert one.work() == 1
    (update, bits), *_ = hub.pushed
    assert not tree_view(bits, hub.weights.layout, "float32").is_finite()
    assert math.isnan(update.computed[0].loss)
    assert len(replicas) == 2, "the worker resets its optimizer"


def test_the_traceback_of_a_worker_is_in_its_log_or_in_rays(tmp_path, capsys):
    one, _ = worker(tmp_path, ["train"], replies=["refused"], algorithm=NeverPushes(inner_steps=4))
    with pytest.raises(ConfigError):
        one.work()
    assert "NeverPushes" in (tmp_path / "worker-2.log").read_text()
    assert capsys.readouterr().out == ""
    worker(tmp_path / "nowhere", [])
    assert "worker 2: incarnation 5" in capsys.readouterr().out
    assert not (tmp_path / "nowhere").exists()


def test_a_worker_pulls_trains_and_pushes_its_delta(tmp_path, replicas):
    one, hub = worker(tmp_path, ["wait", "train", "train", "finished"])
    assert one.work() == 2
    replica = LocalReplica(Regression(), optimizer=AdamW(lr=0.01), seed=2)
    for update, bits in hub.pushed:
        replica.load(hub.weights)
        replica.train(4, Work(shard=0, start=4 * (update.round_id[0] - 2), schedule=0, examples=64))
        assert tree_view(bits, hub.weights.layout, "float32").same_bits(hub.weights - replica.params())
    assert hub.registrations == [(2, 5, str(data_fingerprint(Regression())))]
    assert hub.pulls == [None, None, (2, 1), (3, 1)], "a pull names the worker's last round"
    assert hub.started == [(2, 1), (3, 1)]
    assert len(replicas) == 1, "the worker keeps its optimizer"
    first = hub.pushed[0][0]
    assert 10.0 <= first.begin_s <= first.computed[0].start_s <= first.computed[0].end_s <= first.pushed_s, "on the hub's clock"
    assert sum(stretch.steps for stretch in first.computed) == 4
    assert torch.get_num_threads() == 1


def test_a_worker_resets_its_optimizer_after_a_lost_or_refused_round(tmp_path, replicas):
    one, _ = worker(tmp_path, ["train", "fresh", "train", "finished"], replies=["unknown", "refused", "accepted"])
    assert one.work() == 3
    assert len(replicas) == 3


@pytest.mark.parametrize(("status", "keeps"), [("train", True), ("fresh", False)])
def test_a_worker_adds_its_error_buffer_to_the_next_delta_unless_it_was_reset(tmp_path, status, keeps):
    codec = CODECS["int4"]
    one, hub = worker(tmp_path, ["train", status, "finished"], algorithm=AsyncLocalSGD(inner_steps=4, codec="int4"))
    assert one.work() == 2
    replica = LocalReplica(Regression(), optimizer=AdamW(lr=0.01), seed=2)
    error = hub.weights.zeros().flat
    for number, (update, data) in enumerate(hub.pushed):
        if number and not keeps:
            replica, error = LocalReplica(Regression(), optimizer=AdamW(lr=0.01), seed=2), torch.zeros_like(error)
        replica.load(hub.weights)
        replica.train(4, Work(shard=0, start=4 * (update.round_id[0] - 2), schedule=0, examples=64))
        error += (hub.weights - replica.params()).flat
        assert torch.equal(torch.from_numpy(data), codec.encode(error))
        error = error - codec.decode(torch.from_numpy(data), error.numel())
        assert error.any()


def test_an_unknown_worker_registers_again(tmp_path, replicas):
    one, hub = worker(tmp_path, ["train", "register", "train", "replaced"], replies=["register", "accepted"])
    assert one.work() == 2
    assert len(hub.registrations) == 2
    assert hub.pulls[2] is None
    assert len(replicas) == 2


def test_a_worker_pulls_again_after_lost_weights(tmp_path):
    one, hub = worker(tmp_path, ["lost", "train", "finished"])
    assert one.work() == 1
    assert hub.pulls[:2] == [None, None]
    assert len(hub.asked_again) == 1, "a live hub would publish the same reference again"
    assert "are lost" in (tmp_path / "worker-2.log").read_text()


def test_a_refused_worker_raises_the_reason(tmp_path):
    one, _ = worker(tmp_path, [], refusal="it reads other data")
    with pytest.raises(ConfigError, match="it reads other data"):
        one.work()


class NeverPushes(AsyncLocalSGD):
    async def round(self, replica, hub):
        await hub.pull()


def test_a_round_without_a_push_is_refused(tmp_path):
    one, _ = worker(tmp_path, ["train"], algorithm=NeverPushes(inner_steps=4))
    with pytest.raises(ConfigError, match=r"NeverPushes\.round ended without a push"):
        one.work()


@pytest.fixture
def loads(monkeypatch):
    """Counts how often data are loaded."""
    counted = []
    monkeypatch.setattr("atoll.engines.warm_start_training.load_data", lambda *given: counted.append(given) or load_data(*given))
    return counted


def test_a_worker_loads_its_data_once(loads, replicas, tmp_path):
    run = Ray(processes=2).fitted(override(recipes.toy_async(), ["data.examples=512", "data.eval_examples=128"], candidates))
    for devices in (2, 1):
        one, hub = worker(tmp_path, ["register", "finished"], run=run.resolved, devices=devices)
        assert one.work() == 0
        assert len(hub.registrations[1][2]) > 0
    assert len(loads) == 2, "two workers"
    on_two, on_one = (len(replica.tensors()["parameters"]) for replica in replicas)
    assert on_two == 2 * on_one, "each of its devices has a copy"
