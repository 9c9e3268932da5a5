"""A run whose islands are threads of one process, which meet over a real lighthouse and real sockets."""

import gc
import threading
from dataclasses import replace

import pytest
import torch

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.engines.elastic import island as islands
from atoll.engines.elastic import recovery, registry, shutdown
from atoll.engines.elastic.engine import ElasticEngine
from atoll.engines.elastic.island import Island
from atoll.engines.elastic.launch import create_elastic
from atoll.engines.elastic.rendezvous import Harbour, free_port
from atoll.engines.elastic.spec import Invitation
from atoll.engines.processes.spec import placed
from atoll.engines.warm_start import Cache, load_data, warm_up
from atoll.runs.folder import RunFolder
from atoll.runs.workloads import plain_workload
from atoll.telemetry import read_events
from atoll.testing.chaos import FaultScript
from atoll.testing.simulated_runs import Recorder

HOST = "127.0.0.1"
SETTINGS = (
    "model.hidden=8",
    "data.examples=512",
    "data.dimensions=16",
    "data.clusters_per_class=1",
    "data.eval_examples=128",
    "algorithm.inner_steps=2",
    "train.steps=8",
    "train.warm_start_steps=3",
    "train.batch_size=8",
    "keep.evaluate_every=4",
    "keep.save_every=4",
)


class Died(BaseException):
    """An island is gone, between a commit and the log of it."""


class Shore:
    """A run whose islands are threads here."""

    def __init__(self, folder, run, place, *update_faults):
        self.run, self.folder = run, create_elastic(run, place, folder, ["test"])
        self.chaos = self.folder / "chaos.json"
        self.chaos.write_text(FaultScript(update_faults=update_faults).to_text())
        port, self.errors, self.said = free_port(HOST), [], []
        self.invitation = Invitation(run, place, f"{HOST}:{port}")
        self.something_said = threading.Condition()
        self.waits = {}
        """What is waited for, by whom, after which of its rounds: until something is said that begins so."""
        resolved = run.resolved  # whoever starts islands makes the warm start first, and threads share their random numbers
        plain = plain_workload(resolved, load_data(resolved, Cache()))
        warm_up(resolved, plain, file=RunFolder(self.folder).warm_start, cache=None, sink=Recorder())
        self.harbour = Harbour(HOST, 0, port, self.invitation.to_text(), join_limit_s=30.0, silent_s=0.8)

    def start(self, *names, home=True, until=None, clock_s=None):
        """Islands that take part, each in a thread; they die when they have committed a round, if one is given."""
        threads = [threading.Thread(target=self._take_part, args=(name, home, until, clock_s), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        return threads

    def _take_part(self, name, home, until, clock_s):
        torch.set_num_threads(1)

        def say(text):
            self.note(text)
            if until is not None and text.startswith(f"committed round {until} "):
                raise Died
            if text.startswith(f"{name} begins with") and clock_s is not None:
                island._engine.clock.set(clock_s)
            for (who, number), what in self.waits.items():
                if who == name and text.startswith(f"committed round {number} "):
                    self.wait_until(what)

        try:
            island = Island(self.invitation, self.harbour.address, HOST, name, self.folder if home else None, say, self.chaos)
            sound = False
            try:
                island.carry_out()
                sound = True
            finally:  # a thread that is left asks the roll while the interpreter ends, which aborts it
                island.close(wait=sound)
        except Died:
            return
        except Exception as error:
            self.errors.append(error)
            self.note(f"{name} ended: {error}")

    def one_island(self, name="island-0000"):
        """One in no thread, to be driven by hand."""
        return Island(self.invitation, self.harbour.address, HOST, name, self.folder, lambda text: None)

    def wait_until(self, what):
        """Until something is said that begins so."""
        with self.something_said:
            assert self.something_said.wait_for(lambda: any(text.startswith(what) for text in self.said), 30.0), (what, self.said)

    def note(self, text):
        with self.something_said:
            self.said.append(text)
            self.something_said.notify_all()

    def finish(self, threads):
        for thread in threads:
            thread.join(60.0)
        assert not self.errors, self.errors
        assert not any(thread.is_alive() for thread in threads), self.said
        self.harbour.close()

    def events(self, kind):
        return [event for event in read_events(RunFolder(self.folder).events) if isinstance(event, kind)]


@pytest.fixture(scope="module")
def _light():
    """An island that leaves collects what it holds: what was here before the tests is not looked through each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def _hasty(monkeypatch):
    """Islands sign and look more often, and are taken for dead sooner."""
    monkeypatch.setattr(registry, "BEAT_S", 0.1)
    monkeypatch.setattr(registry, "SILENT_S", 1.0)
    monkeypatch.setattr(recovery, "_ALONE_S", 1.0)
    for room in (recovery, shutdown, islands):
        monkeypatch.setattr(room, "_LOOK_S", 0.05)


@pytest.fixture
def toy():
    """Makes a small run of so many islands: `toy(2, "train.steps=16")`."""

    def make(islands, *settings):
        return placed(override(recipes.ALL["toy-sync"](), [*SETTINGS, *settings]), islands)

    return make


@pytest.fixture
def shore_of(tmp_path, _light, _hasty):
    """Makes the shore of a run, whose folder is `run`, with what is to be spoilt there."""

    def make(run, place, *update_faults):
        return Shore(tmp_path / "run", run, place, *update_faults)

    return make


class OtherBits:
    """An algorithm on a machine that rounds otherwise."""

    def __init__(self, algorithm):
        self._algorithm, self.steps_per_round = algorithm, algorithm.steps_per_round
        self.init = algorithm.init

    async def round(self, state, replica, peers):
        after = await self._algorithm.round(state, replica, peers)
        return replace(after, params=after.params * (1 + 2**-23))


@pytest.fixture
def rounding(monkeypatch):
    """Has one island round otherwise than the others."""

    def one(who):
        def engine(*, name, algorithm, **others):
            return ElasticEngine(name=name, algorithm=OtherBits(algorithm) if name == who else algorithm, **others)

        monkeypatch.setattr(islands, "ElasticEngine", engine)

    return one
