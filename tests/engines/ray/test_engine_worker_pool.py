"""Dead workers are replaced, without Ray: a list stands for the actors."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.core.errors import ConfigError, ExchangeFailed
from atoll.engines.ray.engine import WorkerPool
from atoll.engines.ray.spec import Ray
from atoll.engines.ray.worker import WorkerProcessSpec
from atoll.recipes.toy import toy_async


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
    """Actors are namespaces with their specs; `ends` has the results of ended workers."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self):
        self.started, self.killed, self.ends, self.settings = [], [], {}, None

    def remote(self, kind):
        return self

    def options(self, **settings):
        self.settings = settings
        return SimpleNamespace(remote=self.start)

    def start(self, spec, hub):
        work = f"work of incarnation {spec.incarnation}"
        self.started.append(SimpleNamespace(spec=spec, work=SimpleNamespace(remote=lambda: work)))
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


def pool_of(workers=2, max_workers=None):
    """A pool, its Ray, what it logs, and the dead workers that it reports to the hub."""
    ray, logged, died = FakeRay(), [], []
    client = SimpleNamespace(hub="hub", call=lambda method, *arguments: died.append(arguments))
    engine = Ray(processes=workers, max_workers=max_workers)
    spec = WorkerProcessSpec(run=toy_async(), engine=engine, gpus=0.5, workload=None, weights=(), logs=Path("logs"))
    pool = WorkerPool(ray, client, spec, logged.append)
    pool.turn = lambda workers=None, overdue=None: pool.supervise(SimpleNamespace(workers=workers or {}, overdue=overdue or {}))
    pool.dies = lambda worker, error: ray.ends.update({pool.workers[worker].result: error})
    return pool, ray, logged, died


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
def test_a_dead_worker_is_replaced_whatever_it_died_of(error, says):
    pool, ray, logged, died = pool_of()
    pool.dies(1, error)
    pool.turn()
    assert pool.incarnations == {0: 0, 1: 2}
    assert died == [(1, 1)], "the pool reports it to the hub"
    assert ray.killed == [ray.started[1]]
    assert logged == [f"worker 1 has died ({says}); a new one takes its slot"]
    pool.turn()
    assert pool.incarnations == {0: 0, 1: 2}


def test_an_error_of_the_run_ends_it():
    pool, _, _, _ = pool_of()
    pool.dies(0, RayTaskError(ConfigError("it reads other data")))
    with pytest.raises(ConfigError, match="it reads other data"):
        pool.turn()


def test_five_deaths_of_a_slot_without_an_accepted_update_end_the_run():
    pool, _, logged, died = pool_of()
    for _ in range(4):
        pool.dies(1, RayActorError("died"))
        pool.turn({0: (0, True), 1: (pool.workers[1].spec.incarnation, False)})
    pool.dies(1, RayActorError("died again"))
    with pytest.raises(ExchangeFailed, match=r"worker 1 has died 5 times in a row.*died again.*worker-1\.log"):
        pool.turn({0: (0, True)})
    assert (len(logged), len(died)) == (4, 5)


def test_an_accepted_update_resets_the_count_of_deaths():
    pool, _, logged, _ = pool_of()
    for _ in range(3):
        for _ in range(4):
            pool.dies(1, RayActorError("died"))
            pool.turn({1: (pool.workers[1].spec.incarnation - 1, True)})  # an update of its predecessor does not count
        pool.turn({1: (pool.workers[1].spec.incarnation, True)})
    assert len(logged) == 12


def test_a_worker_that_ended_is_replaced_only_if_the_run_continues():
    pool, _, logged, died = pool_of()
    pool.dies(0, 12)
    pool.turn()
    assert (pool.incarnations, died) == ({0: 0, 1: 1}, []), "the next status says whether the run is over"
    pool.turn()
    assert (pool.incarnations, died) == ({0: 2, 1: 1}, [(0, 0)])
    assert "it ended by itself" in logged[0]


def test_all_slots_are_started_and_only_expected_workers_are_logged_as_missing(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr("atoll.engines.ray.engine.time.monotonic", lambda: now.s)
    pool, ray, logged, _ = pool_of(workers=2, max_workers=4)
    assert [actor.spec.worker for actor in ray.started] == [0, 1, 2, 3]
    assert (ray.settings["num_cpus"], ray.settings["num_gpus"], ray.settings["max_restarts"]) == (1.0, 0.5, 0)
    now.s = 16.0
    pool.turn({0: (0, False)})
    assert logged == ["workers [1] have not registered yet: each needs 1 CPU and 0.5 GPU, free are {'CPU': 3.0}"]
    pool.turn({0: (0, False)})
    assert len(logged) == 1, "at most every 15 s"


def test_kill_ends_all_workers():
    pool, ray, _, _ = pool_of(workers=2, max_workers=3)
    pool.kill()
    assert ray.killed == ray.started


def test_overdue_workers_are_logged_every_15_s(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr("atoll.engines.ray.engine.time.monotonic", lambda: now.s)
    pool, _, logged, _ = pool_of()
    registered = {0: (0, True), 1: (1, True)}
    for now.s in (16.0, 17.0, 32.0):
        pool.turn(registered, {1: now.s, 0: 300.0})
        pool.turn(registered)
    assert len(logged) == 2
    assert "0 for 300 s, 1 for 32 s" in logged[1]
