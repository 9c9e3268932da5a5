"""The driving process without Ray: a hub with scripted statuses, and workers that never end."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from atoll.core.errors import ConfigError, ExchangeFailed, TrainingDiverged
from atoll.core.events import Evaluated, Saved
from atoll.core.flat_tree import Tree
from atoll.engines.ray.engine import RayEngine
from atoll.engines.ray.messages import EvaluationRequest, HubStatus, tree_bytes
from atoll.engines.ray.spec import Ray
from atoll.engines.ray.worker import WorkerProcessSpec
from atoll.recipes.toy import toy_async
from atoll.runs.cluster import Cluster
from atoll.runs.run_settings import Train
from atoll.telemetry.sinks import MemorySink

WEIGHTS = Tree.of({"w": torch.ones(3)})


class RayError(Exception):
    pass


class Gone(RayError):
    pass


class TimedOut(RayError):
    pass


def status(epoch=1, **what):
    settings = {
        "events": [],
        "events_seen": 0,
        "evaluations": [],
        "local_updates": 0,
        "workers": {},
        "overdue": {},
        "done": False,
        "evaluated": False,
    }
    return HubStatus(**{"epoch": epoch, "error": None, **settings, **what})


def over(epoch=1, **what):
    return status(epoch, local_updates=40, done=True, evaluated=True, **what)


def request(number=1, weights=WEIGHTS):
    due = Evaluated(
        round=3, steps=0, virtual_time_s=None, wall_time_s=1.0, tokens=0, local_updates=0, sent_bytes_per_island=0.0, metrics={}
    )
    return EvaluationRequest(number, due, (weights if isinstance(weights, Exception) else tree_bytes(weights),), {})


class FakeHub:
    """Replies with these statuses in order, then with the last one. Records the calls."""

    def __init__(self, statuses, ends=(), outcomes=(), after_evaluation=()):
        self.statuses, self.ends, self.outcomes, self.asked = list(statuses), list(ends), list(outcomes), []
        self.after_evaluation, self.saves = after_evaluation, True

    def __getattr__(self, what):
        def remote(*arguments):
            self.asked.append((what, *arguments))
            return self.answer(what)

        return SimpleNamespace(remote=remote)

    def answer(self, what):
        match what:
            case "status":
                return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
            case "finish":
                return self.ends.pop(0) if self.ends else "the figures"
            case "result":
                return (self.outcomes.pop(0) if self.outcomes else tree_bytes(WEIGHTS),), {}
            case "save":
                return self.saves
            case "evaluated":
                self.statuses += self.after_evaluation
        return None

    def of(self, what):
        return [arguments for name, *arguments in self.asked if name == what]


class FakeRay:
    """Replies at once."""

    exceptions = SimpleNamespace(
        RayError=RayError,
        RayTaskError=RayError,
        RayActorError=Gone,
        ObjectLostError=Gone,
        OutOfMemoryError=Gone,
        GetTimeoutError=TimedOut,
    )
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
    util = SimpleNamespace(scheduling_strategies=strategies)

    def __init__(self, hub):
        self.hub, self.killed, self.dead, self.waits = hub, [], set(), 0

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "here")

    def remote(self, kind):
        return SimpleNamespace(options=lambda **settings: SimpleNamespace(remote=self.start))

    def start(self, spec, hub=None):
        return self.hub if hub is None else SimpleNamespace(work=SimpleNamespace(remote=lambda: f"incarnation {spec.incarnation}"))

    def wait(self, works, num_returns, timeout):
        self.waits += 1
        return [work for work in works if work in self.dead], []

    def get(self, found, timeout=None):
        if isinstance(found, str) and found in self.dead:
            raise Gone("died")
        if isinstance(found, Exception):
            raise found
        return found

    def kill(self, actor):
        self.killed.append(actor)


def engine_of(hub, evaluate=lambda params, buffers: {"loss": 1.5}):
    """An engine with two workers, and what it shows and logs."""
    ray, sink, logged = FakeRay(hub), MemorySink(), []
    run = replace(toy_async(), train=Train(steps=20, batch_size=1), cluster=Cluster(islands=2))
    spec = SimpleNamespace(run=run, engine=Ray(hub_timeout_s=5.0), layout=WEIGHTS.layout, dtype="float32")
    worker = WorkerProcessSpec(run=run, engine=spec.engine, gpus=0.0, workload=None, weights=(), logs=Path("logs"))
    engine = RayEngine(ray=ray, hub=spec, worker=worker, evaluate=evaluate, sink=sink, log=logged.append)
    return engine, ray, sink, logged


def run(engine):
    """Drives an engine to the end, as the driver does."""
    assert list(engine.train()) == [], "the hub saves by itself"
    return engine.finish(0), engine.params, engine.buffers()


def test_a_run_shows_events_and_ends_with_the_hubs_weights():
    saved = Saved(round=1, name="00000001")
    hub = FakeHub([status(events=[saved], events_seen=1), over(events_seen=1)])
    engine, _, sink, _ = engine_of(hub)
    finished, params, buffers = run(engine)
    assert (finished, buffers) == ("the figures", {})
    assert params.same_bits(WEIGHTS)
    assert sink.of(Saved) == [saved]
    assert [arguments[:2] for arguments in hub.of("status")][:2] == [[-1, 0], [1, 1]], "it names the events it has seen"
    assert hub.of("set_live_workers") == [], "the first hub has no record of other workers"


def test_a_restarted_hub_learns_the_live_workers():
    hub = FakeHub([status(1), status(2), over(2)])
    run(engine_of(hub)[0])
    assert hub.of("set_live_workers") == [[{0: 0, 1: 1}]]


def test_the_end_of_a_dead_hub_does_not_end_the_run():
    hub = FakeHub([over(1), over(2), over(2), over(2)], ends=["of the first", "of the second"])
    assert run(engine_of(hub)[0])[0] == "of the second"


def test_a_restarted_hub_that_cannot_finish_yet_is_driven_on():
    hub = FakeHub([over(1), over(1), over(1)], ends=[None, "the figures"])
    assert run(engine_of(hub)[0])[0] == "the figures"


def test_lost_final_weights_are_fetched_again():
    hub = FakeHub([over()], outcomes=[Gone("with its owner"), tree_bytes(WEIGHTS)])
    assert run(engine_of(hub)[0])[1].same_bits(WEIGHTS)
    assert len(hub.of("weights_lost")) == 1


def test_metrics_carry_the_number_and_epoch_of_their_request():
    hub = FakeHub([status(1, evaluations=[request(1)]), status(1, done=True)], after_evaluation=[over(1)])
    run(engine_of(hub)[0])
    assert hub.of("evaluated") == [[1, 1, {"loss": 1.5}]]
    assert [arguments[2] for arguments in hub.of("status")][1] == 1, "a request is read once"


def test_dead_workers_are_replaced_during_an_evaluation():
    evaluating = threading.Event()
    hub = FakeHub([status(evaluations=[request(1), request(2)]), status(), status(), over()])

    def evaluate(params, buffers):
        assert evaluating.wait(20)
        return {"loss": 1.0}

    engine, ray, _, logged = engine_of(hub, evaluate)
    ray.dead = {"incarnation 0"}
    run(engine)
    evaluating.set()
    assert hub.of("worker_died") == [[0, 0]]
    assert "worker 0 has died" in logged[0]
    assert hub.of("evaluated") == []


def test_requests_of_a_dead_hub_are_dropped():
    gone = request(2)
    hub = FakeHub([status(1, evaluations=[request(1), gone]), status(2), over(2)])
    seen = []
    run(engine_of(hub, lambda params, buffers: seen.append(params) or {"loss": 1.0})[0])
    assert len(seen) == 1


def test_lost_weights_of_a_request_are_reported_to_the_hub():
    lost = request(1, weights=Gone("spilled, and gone"))
    hub = FakeHub([status(evaluations=[lost]), over()])
    run(engine_of(hub)[0])
    assert hub.of("weights_lost") == [[lost.weights]]
    assert hub.of("evaluated") == [[1, 1, None]], "with this hub's epoch and this number"


@pytest.mark.parametrize(
    ("weights", "evaluate", "error", "says"),
    [
        (WEIGHTS * float("nan"), lambda params, buffers: {"loss": 1.0}, TrainingDiverged, "no longer finite after 3 arrivals"),
        (WEIGHTS, lambda params, buffers: {}["loss"], KeyError, "loss"),
    ],
    ids=["not finite", "an error in evaluate"],
)
def test_a_failed_evaluation_ends_the_run(weights, evaluate, error, says):
    hub = FakeHub([status(evaluations=[request(1, weights)]), status()])
    with pytest.raises(error, match=says):
        run(engine_of(hub, evaluate)[0])


def test_an_error_of_the_hub_ends_the_run():
    hub = FakeHub([status(error=ConfigError("no such thing"))])
    with pytest.raises(ConfigError, match="no such thing"):
        run(engine_of(hub)[0])


def test_a_hub_that_dies_repeatedly_without_a_newer_checkpoint_ends_the_run():
    hub = FakeHub([status(epoch, local_updates=8) for epoch in range(1, 20)])
    with pytest.raises(ExchangeFailed, match=r"the hub has died 5 times in a row.*from 8 local updates each time"):
        run(engine_of(hub)[0])
    hub = FakeHub([*(status(epoch, local_updates=epoch) for epoch in range(1, 20)), over(19)])
    assert run(engine_of(hub)[0])[0] == "the figures", "but not if each has a newer checkpoint"


@pytest.mark.parametrize(
    ("saves", "says"),
    [(True, None), (False, "it could not"), (TimedOut("30 s"), "TimedOut"), (Gone("died"), "Gone")],
    ids=["saved", "failed", "slow", "dead"],
)
def test_an_interrupted_run_is_saved_or_logs_why_not(saves, says):
    hub = FakeHub([status()])
    hub.saves = saves
    engine, ray, _, logged = engine_of(hub)
    engine.close(save=True)
    assert len(hub.of("save")) == 1
    assert ray.killed == [hub]
    assert [says in line for line in logged] == ([] if says is None else [True])
    engine.close(save=False)
    assert len(hub.of("save")) == 1
