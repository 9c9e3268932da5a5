"""Workers that die, and others that take their places, without Ray: a list of actors stands in."""

from types import SimpleNamespace

import pytest

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.engines.ray.worker_pool import Crew


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


class OutOfMemoryError(RayError):
    pass


class RayTaskError(RayError):
    def __init__(self, cause):
        super().__init__(f"Traceback of a worker\n{cause}")
        self.cause = cause


class FakeRay:
    """Actors are namespaces with the order that they were given; `ends` says what became of the work of some."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self):
        self.started, self.killed, self.ends, self.settings = [], [], {}, None

    def remote(self, kind):
        return self

    def options(self, **settings):
        self.settings = settings
        return SimpleNamespace(remote=self.start)

    def start(self, order, hub):
        work = f"work of life {order.life}"
        self.started.append(SimpleNamespace(order=order, work=SimpleNamespace(remote=lambda: work)))
        return self.started[-1]

    def wait(self, works, num_returns, timeout):
        assert (num_returns, timeout) == (len(works), 0)
        return [work for work in works if work in self.ends], []

    def get(self, work):
        if isinstance(self.ends[work], Exception):
            raise self.ends[work]
        return self.ends[work]

    def kill(self, actor):
        self.killed.append(actor)

    def available_resources(self):
        return {"CPU": 3.0, "memory": 1e9}


def crew(workers=2, most=None):
    """A crew, its Ray, what it says, and who has left."""
    ray, said, left = FakeRay(), [], []

    def order(number, life):
        return SimpleNamespace(number=number, life=life, log=f"worker-{number}.log")

    one = Crew(ray, "hub", workers=workers, most=most or workers, order=order, cpus=1.0, gpus=0.5, say=said.append)
    one.turn = lambda seats=None: one.look_after(seats or {}, lambda number, life: left.append((number, life)))
    one.dies = lambda number, error: ray.ends.update({one.hired[number].work: error})
    return one, ray, said, left


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RayActorError("The actor died.\nits id is 7"), "The actor died"),
        (OutOfMemoryError("Killed for memory.\nand so on"), "Killed for memory"),
        (RayTaskError(RuntimeError("CUDA error: uncorrectable ECC")), "CUDA error: uncorrectable ECC"),
        (RayTaskError(ExchangeFailed("it did not reach the hub")), "it did not reach the hub"),
    ],
    ids=["killed", "memory", "exception", "cut off"],
)
def test_whatever_one_worker_dies_of_another_takes_its_place(error, says):
    one, ray, said, left = crew()
    one.dies(1, error)
    one.turn()
    assert one.lives == {0: 0, 1: 2}
    assert left == [(1, 1)], "the hub hears of it"
    assert ray.killed == [ray.started[1]]
    assert said == [f"worker 1 is gone ({says}); another takes its place"]
    one.turn()
    assert one.lives == {0: 0, 1: 2}


def test_an_error_that_says_what_is_wrong_with_the_run_ends_it():
    one, _, _, _ = crew()
    one.dies(0, RayTaskError(ConfigError("it reads other data")))
    with pytest.raises(ConfigError, match="it reads other data"):
        one.turn()


def test_a_worker_that_dies_five_times_before_it_brings_anything_ends_the_run_whatever_others_bring():
    one, _, said, left = crew()
    for _ in range(4):
        one.dies(1, RayActorError("died"))
        one.turn({0: (0, True), 1: (one.hired[1].life, False)})
    one.dies(1, RayActorError("died again"))
    with pytest.raises(ExchangeFailed, match=r"worker 1 has died 5 times in a row.*died again.*worker-1\.log"):
        one.turn({0: (0, True)})
    assert (len(said), len(left)) == (4, 5)


def test_who_has_brought_something_may_die_again():
    one, _, said, _ = crew()
    for _ in range(3):
        for _ in range(4):
            one.dies(1, RayActorError("died"))
            one.turn({1: (one.hired[1].life - 1, True)})  # what the one before it brought does not count
        one.turn({1: (one.hired[1].life, True)})
    assert len(said) == 12


def test_who_ends_by_itself_is_replaced_only_if_the_run_goes_on():
    one, _, said, left = crew()
    one.dies(0, 12)
    one.turn()
    assert (one.lives, left) == ({0: 0, 1: 1}, []), "the hub told it that the run is over, which will be heard here too"
    one.turn()
    assert (one.lives, left) == ({0: 2, 1: 1}, [(0, 0)])
    assert "it ended by itself" in said[0]


def test_more_than_are_expected_are_asked_for_and_only_the_expected_are_missed(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr("atoll.engines.ray.worker_pool.time.monotonic", lambda: now.s)
    one, ray, said, _ = crew(workers=2, most=4)
    assert [actor.order.number for actor in ray.started] == [0, 1, 2, 3]
    assert (ray.settings["num_cpus"], ray.settings["num_gpus"], ray.settings["max_restarts"]) == (1.0, 0.5, 0)
    now.s = 31.0
    one.turn({0: (0, False)})
    assert said == ["workers [1] have not come yet: each needs 1 CPU and 0.5 GPU, free are {'CPU': 3.0}"]
    one.turn({0: (0, False)})
    assert len(said) == 1, "not at every turn"


def test_all_are_dismissed():
    one, ray, _, _ = crew(workers=2, most=3)
    one.dismiss()
    assert ray.killed == ray.started


def test_who_lives_and_brings_nothing_is_mentioned_now_and_then(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr("atoll.engines.ray.worker_pool.time.monotonic", lambda: now.s)
    one, _, said, _ = crew()
    for now.s in (31.0, 32.0, 62.0):
        one.mention({1: now.s, 0: 300.0})
        one.mention({})
    assert len(said) == 2
    assert "0 for 300 s, 1 for 62 s" in said[1]
