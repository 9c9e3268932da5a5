"""Whoever drives a run on Ray, without Ray: a hub that tells what a test says, and workers that never end."""

import threading
from types import SimpleNamespace

import pytest
import torch

from atoll.core.errors import ConfigError, ExchangeFailed, TrainingDiverged
from atoll.core.events import Evaluated, Saved
from atoll.core.flat_tree import Tree
from atoll.engines.ray.engine import RayEngine
from atoll.engines.ray.hub_spec import News, ToJudge
from atoll.engines.ray.messages import bits_of
from atoll.telemetry.sinks import Remembered

WEIGHTS = Tree.of({"w": torch.ones(3)})


class RayError(Exception):
    pass


class Gone(RayError):
    pass


class Silent(RayError):
    pass


def news(epoch=1, **what):
    settings = {
        "events": [],
        "heard": 0,
        "to_judge": [],
        "local_updates": 0,
        "seats": {},
        "silent": {},
        "done": False,
        "judged": False,
    }
    return News(**{"epoch": epoch, "error": None, **settings, **what})


def over(epoch=1, **what):
    return news(epoch, local_updates=40, done=True, judged=True, **what)


def to_judge(number=1, weights=WEIGHTS):
    due = Evaluated(
        round=3, steps=0, virtual_time_s=None, wall_time_s=1.0, tokens=0, local_updates=0, sent_bytes_per_island=0.0, metrics={}
    )
    return ToJudge(number, due, (weights if isinstance(weights, Exception) else bits_of(weights),), {})


class FakeHub:
    """Tells these news, one after the other; then the last for ever. Remembers what it is asked."""

    def __init__(self, tells, ends=(), outcomes=(), once_judged=()):
        self.tells, self.ends, self.outcomes, self.asked = list(tells), list(ends), list(outcomes), []
        self.once_judged, self.saves = once_judged, True

    def __getattr__(self, what):
        def remote(*arguments):
            self.asked.append((what, *arguments))
            return self.answer(what)

        return SimpleNamespace(remote=remote)

    def answer(self, what):
        match what:
            case "news":
                return self.tells.pop(0) if len(self.tells) > 1 else self.tells[0]
            case "finish":
                return self.ends.pop(0) if self.ends else "the figures"
            case "outcome":
                return (self.outcomes.pop(0) if self.outcomes else bits_of(WEIGHTS),), {}
            case "save":
                return self.saves
            case "judged":
                self.tells += self.once_judged
        return None

    def of(self, what):
        return [arguments for name, *arguments in self.asked if name == what]


class FakeRay:
    """Hub and workers are what they are; an answer is there at once."""

    exceptions = SimpleNamespace(
        RayError=RayError,
        RayTaskError=RayError,
        RayActorError=Gone,
        ObjectLostError=Gone,
        OutOfMemoryError=Gone,
        GetTimeoutError=Silent,
    )
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
    util = SimpleNamespace(scheduling_strategies=strategies)

    def __init__(self, hub):
        self.hub, self.killed, self.dead, self.waits = hub, [], set(), 0

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "here")

    def remote(self, kind):
        return SimpleNamespace(options=lambda **settings: SimpleNamespace(remote=self.start))

    def start(self, order, hub=None):
        return self.hub if hub is None else SimpleNamespace(work=SimpleNamespace(remote=lambda: f"life {order.life}"))

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


def engine(hub, evaluate=lambda params, buffers: {"loss": 1.5}):
    """An engine with two workers, and what it shows and says."""
    ray, sink, said = FakeRay(hub), Remembered(), []
    order = SimpleNamespace(workers=2, places=2, layout=WEIGHTS.layout, dtype="float32", updates=40)
    one = RayEngine(
        ray=ray,
        order=order,
        worker=lambda number, life: SimpleNamespace(number=number, life=life, log="a log"),
        most=2,
        cpus=1.0,
        gpus=0.0,
        evaluate=evaluate,
        sink=sink,
        steps=20,
        limit_s=5.0,
        say=said.append,
    )
    return one, ray, sink, said


def test_a_run_is_shown_and_ends_with_the_hubs_weights():
    saved = Saved(round=1, name="00000001")
    hub = FakeHub([news(events=[saved], heard=1), over(heard=1)])
    one, _, sink, _ = engine(hub)
    finished, params, buffers = one.run()
    assert (finished, buffers) == ("the figures", {})
    assert params.same_bits(WEIGHTS)
    assert sink.of(Saved) == [saved]
    assert [arguments[:2] for arguments in hub.of("news")][:2] == [[-1, 0], [1, 1]], "it says what it has heard"
    assert hub.of("census") == [], "the first hub knows nobody else's workers"


def test_another_hub_is_told_who_lives():
    hub = FakeHub([news(1), news(2), over(2)])
    engine(hub)[0].run()
    assert hub.of("census") == [[{0: 0, 1: 1}]]


def test_the_end_of_a_dead_hub_is_not_the_runs():
    hub = FakeHub([over(1), over(2), over(2), over(2)], ends=["of the first", "of the second"])
    assert engine(hub)[0].run()[0] == "of the second"


def test_a_hub_that_has_come_after_another_is_driven_on():
    hub = FakeHub([over(1), over(1), over(1)], ends=[None, "the figures"])
    assert engine(hub)[0].run()[0] == "the figures"


def test_final_weights_that_are_lost_are_asked_for_again():
    hub = FakeHub([over()], outcomes=[Gone("with its owner"), bits_of(WEIGHTS)])
    assert engine(hub)[0].run()[1].same_bits(WEIGHTS)
    assert len(hub.of("lost")) == 1


def test_weights_are_judged_under_the_number_and_the_epoch_of_their_hub():
    hub = FakeHub([news(1, to_judge=[to_judge(1)]), news(1, done=True)], once_judged=[over(1)])
    engine(hub)[0].run()
    assert hub.of("judged") == [[1, 1, {"loss": 1.5}]]
    assert [arguments[2] for arguments in hub.of("news")][1] == 1, "and were handed out once"


def test_while_weights_are_judged_workers_that_die_are_replaced():
    judging = threading.Event()
    hub = FakeHub([news(to_judge=[to_judge(1), to_judge(2)]), news(), news(), over()])

    def evaluate(params, buffers):
        assert judging.wait(20)
        return {"loss": 1.0}

    one, ray, _, said = engine(hub, evaluate)
    ray.dead = {"life 0"}
    one.run()
    judging.set()
    assert hub.of("left") == [[0, 0]]
    assert "worker 0 is gone" in said[0]
    assert hub.of("judged") == []


def test_what_another_hub_had_filed_is_not_judged_any_more():
    gone = to_judge(2)
    hub = FakeHub([news(1, to_judge=[to_judge(1), gone]), news(2), over(2)])
    seen = []
    engine(hub, lambda params, buffers: seen.append(params) or {"loss": 1.0})[0].run()
    assert len(seen) == 1


def test_weights_that_are_lost_before_they_are_judged_are_told_to_the_hub():
    lost = to_judge(1, weights=Gone("spilled, and gone"))
    hub = FakeHub([news(to_judge=[lost]), over()])
    engine(hub)[0].run()
    assert hub.of("lost") == [[lost.weights]]
    assert hub.of("leave_unjudged") == [[1, 1]], "of this hub, under this number"


@pytest.mark.parametrize(
    ("weights", "evaluate", "error", "says"),
    [
        (WEIGHTS * float("nan"), lambda params, buffers: {"loss": 1.0}, TrainingDiverged, "no longer finite after 3 arrivals"),
        (WEIGHTS, lambda params, buffers: {}["loss"], KeyError, "loss"),
    ],
    ids=["not finite", "an error in evaluate"],
)
def test_weights_that_cannot_be_judged_end_the_run(weights, evaluate, error, says):
    hub = FakeHub([news(to_judge=[to_judge(1, weights)]), news()])
    with pytest.raises(error, match=says):
        engine(hub, evaluate)[0].run()


def test_an_error_of_the_hub_is_the_runs():
    hub = FakeHub([news(error=ConfigError("no such thing"))])
    with pytest.raises(ConfigError, match="no such thing"):
        engine(hub)[0].run()


def test_a_hub_that_dies_again_and_again_before_it_saves_anything_new_ends_the_run():
    hub = FakeHub([news(epoch, local_updates=8) for epoch in range(1, 20)])
    with pytest.raises(ExchangeFailed, match=r"the hub has died 5 times in a row.*from 8 local updates again"):
        engine(hub)[0].run()
    hub = FakeHub([*(news(epoch, local_updates=epoch) for epoch in range(1, 20)), over(19)])
    assert engine(hub)[0].run()[0] == "the figures", "but not if each gets a little further"


@pytest.mark.parametrize(
    ("saves", "says"),
    [(True, None), (False, "it could not"), (Silent("30 s"), "Silent"), (Gone("died"), "Gone")],
    ids=["saved", "failed", "slow", "dead"],
)
def test_a_run_that_is_broken_off_is_saved_and_says_if_it_could_not_be(saves, says):
    hub = FakeHub([news()])
    hub.saves = saves
    one, ray, _, said = engine(hub)
    one.close(save=True)
    assert len(hub.of("save")) == 1
    assert ray.killed == [hub]
    assert [says in line for line in said] == ([] if says is None else [True])
    one.close(save=False)
    assert len(hub.of("save")) == 1
