"""A run whose islands are threads of one process, which commit over a real lighthouse and real sockets."""

import gc
import subprocess
import threading
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.engines.elastic import island as island_module, recovery, rendezvous
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.engine import ElasticEngine
from atoll.engines.elastic.island import IslandOutput, IslandProcess
from atoll.engines.elastic.rendezvous import Rendezvous
from atoll.engines.elastic.spec import Elastic, JoinInfo
from atoll.engines.network_interfaces import free_port
from atoll.engines.run_lifecycle import RunRequest
from atoll.engines.warm_start_training import RunPreparation
from atoll.runs.folder import RunFolder
from atoll.telemetry.event_log import read_events
from atoll.testing.chaos.faults import FaultScript
from atoll.testing.chaos.update_faults import interpose_update_faults
from atoll.testing.simulated_runs import Recorder

HOST = "127.0.0.1"
PATIENCE_S = 180.0  # bounds a failure alone: a busy machine takes long
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
    """An island died between a commit and its entry in the event log."""


def created(run, spec, folder):
    """A new folder of this run, without starting it."""
    with RunRequest(run=run, spec=spec, out=folder, command=["test"]).open():
        return folder


class ThreadedRun:
    """A run whose islands are threads of this process."""

    def __init__(self, folder, run, spec, *update_faults):
        self.run, self.folder = run, created(run, spec, folder)
        script = self.folder / "chaos.json"
        script.write_text(FaultScript(update_faults=update_faults).to_text())
        self.interpose = interpose_update_faults(script)
        port, self.errors, self.logged = free_port(HOST), [], []
        self.join_info = JoinInfo(run, spec, f"{HOST}:{port}")
        self.something_logged, self.workload = threading.Condition(), None
        self.waits = {}
        """By island and round: after that commit, the island waits until a line is logged that begins like this."""
        # The warm start precedes the islands: threads share their random numbers.
        RunPreparation(run.resolved).warm_start(RunFolder(self.folder).warm_start, Recorder())
        fast = replace(spec, quorum_timeout_s=30.0, heartbeat_timeout_s=0.8)
        self.rendezvous = Rendezvous(replace(self.join_info, spec=fast), f"{HOST}:0")

    def network(self):
        return DirectNetwork(HOST, self.rendezvous.address, self.join_info.lighthouse, self.join_info.run_id)

    def start(self, *names, has_folder=True, dies_after=None, clock_s=None, copy=None):
        """Islands that take part, each in a thread; they die when they have committed round `dies_after`. A joiner may keep a
        `copy` of the folder."""
        options = has_folder, dies_after, clock_s, copy
        threads = [threading.Thread(target=self._take_part, args=(name, *options), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        return threads

    def _take_part(self, name, has_folder, dies_after, clock_s, copy):
        torch.set_num_threads(1)

        def log(text):
            self.log(text)
            if dies_after is not None and text.startswith(f"committed round {dies_after} "):
                raise Died
            if text.startswith(f"{name} begins with") and clock_s is not None:
                island._engine.clock.set(clock_s)
            for (who, number), what in self.waits.items():
                if who == name and text.startswith(f"committed round {number} "):
                    self.wait_until(what)

        folder, own = (self.folder, None) if has_folder else (copy, self.join_info.spec if copy else None)
        try:
            island = IslandProcess(
                self.join_info, self.network(), name, folder, IslandOutput(log), self.interpose, own, workload=self.workload
            )
            ended = False
            try:
                island.run()
                ended = True
            finally:  # a registry thread that outlives the interpreter aborts it
                island.close(wait=ended)
        except Died:
            return
        except Exception as error:
            self.errors.append(error)
            self.log(f"{name} ended: {error}")

    def one_island(self, name="island-0000"):
        """An island without a thread, which the test drives."""
        return IslandProcess(self.join_info, self.network(), name, self.folder, IslandOutput(lambda text: None))

    def wait_until(self, what):
        """Waits for a log line that begins with this text."""
        with self.something_logged:
            found = self.something_logged.wait_for(lambda: any(text.startswith(what) for text in self.logged), PATIENCE_S)
            assert found, (what, self.logged)

    def reached(self, number):
        return any(text.startswith(f"committed round {number} ") for text in self.logged)

    def log(self, text):
        with self.something_logged:
            self.logged.append(text)
            self.something_logged.notify_all()

    def finish(self, threads, *, last=True):
        """Wait for the ends of these islands, and end the rendezvous behind the last ones."""
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not self.errors, self.errors
        assert not any(thread.is_alive() for thread in threads), self.logged
        if last:
            self.rendezvous.close()

    def events(self, kind):
        return [event for event in read_events(RunFolder(self.folder).events) if isinstance(event, kind)]


@pytest.fixture(scope="module")
def _frozen_garbage():
    """An island that leaves collects garbage: objects from before the tests are not looked through each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def _fast_heartbeats(monkeypatch):
    """Islands register and poll more often, and count as dead sooner."""
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(rendezvous, "UNREGISTERED_S", 1.0)
    monkeypatch.setattr(recovery, "_ALONE_S", 1.0)
    for module in (recovery, island_module):
        monkeypatch.setattr(module, "_POLL_S", 0.05)


@pytest.fixture
def toy():
    """Makes a small run: `toy(2, "train.steps=16")` of two islands."""

    def make(islands, *settings):
        return Elastic(processes=islands).fitted(override(recipes.ALL["toy-sync"](), [*SETTINGS, *settings]))

    return make


@pytest.fixture
def threaded(tmp_path, _frozen_garbage, _fast_heartbeats):
    """Makes a threaded run in the folder `run`, with update faults."""

    def make(run, spec, *update_faults):
        return ThreadedRun(tmp_path / "run", run, spec, *update_faults)

    return make


class SmallDisk:
    """A file system of 1 MB, which a test can fill."""

    def __init__(self, path):
        self.path = path

    def fill(self):
        with suppress(OSError), (self.path / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self):
        (self.path / "filler").unlink()


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    yield SmallDisk(path)
    subprocess.run(["umount", "-l", str(path)], check=True)


class OtherRounding:
    """An algorithm on a machine that rounds differently."""

    def __init__(self, algorithm):
        self._algorithm, self.steps_per_round = algorithm, algorithm.steps_per_round
        self.init = algorithm.init

    async def round(self, state, replica, peers):
        after = await self._algorithm.round(state, replica, peers)
        return replace(after, params=after.params * (1 + 2**-23))


@pytest.fixture
def diverging(monkeypatch):
    """Makes one island round differently from the others."""

    def one(who):
        def engine(algorithm, membership, status, *others):
            return ElasticEngine(OtherRounding(algorithm) if status.name == who else algorithm, membership, status, *others)

        monkeypatch.setattr(island_module, "ElasticEngine", engine)

    return one
