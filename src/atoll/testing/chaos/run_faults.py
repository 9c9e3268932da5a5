"""Fault scripts attached to runs: what `atoll chaos` hands to the driver."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import ConfigError
from atoll.engines.driver import RunTask
from atoll.engines.elastic.spec import Elastic
from atoll.engines.elastic.supervisor import ProcessHooks, island_name
from atoll.engines.ray.spec import Ray
from atoll.engines.spec import EngineSpec
from atoll.runs.run import Run
from atoll.testing.chaos.fault_injector import FaultInjector, NamespaceNetwork, check_links, namespace_network
from atoll.testing.chaos.faults import CHAOS_LOG, LIGHTHOUSE, FaultScript
from atoll.testing.chaos.ray_faults import RayFaultInjector, check_ray_script
from atoll.testing.chaos.reports import ElasticReport, HubReport, elastic_report, hub_report
from atoll.testing.chaos.update_faults import faulty_island_command


@dataclass(frozen=True)
class RunFaults:
    """The faults of a script, to be injected into a run: `atoll.run(run, engine=atoll.Elastic(), faults=RunFaults(script))`."""

    script: FaultScript

    def check(self, run: Run, spec: EngineSpec) -> None:
        """Refuse an engine that takes no faults, and faults of processes and links that the run does not have."""
        if isinstance(spec, Ray):
            check_ray_script(self.script, spec.worker_slots(run))
            return
        if not isinstance(spec, Elastic):
            raise ConfigError(f"a fault script with --engine {spec.name}: faults are injected into elastic runs and runs on Ray.")
        names = [LIGHTHOUSE, *_islands(run, spec)]
        unknown = sorted(self.script.victims - set(names))
        if unknown:
            raise ConfigError(
                f"a fault script has the victims {', '.join(unknown)}; the run starts {', '.join(names)}. Name one of these."
            )
        check_links(self.script, names)

    @contextmanager
    def attach(self, task: RunTask) -> Iterator[ProcessHooks | RayFaultInjector]:
        """Inject the faults while the context is open, and revert them at its end."""
        folder, spec = task.folder.path, task.spec
        if not isinstance(spec, Elastic):
            with RayFaultInjector(self.script, folder) as injector:
                yield injector
            return
        with ExitStack() as stack:
            network = None
            if self.script.links:
                network = stack.enter_context(namespace_network(_islands(task.run, spec)))
            hooks = FaultHooks(self.script, folder, network)
            stack.callback(hooks.injector.close)
            yield hooks

    @staticmethod
    def report(folder: Path, spec: EngineSpec) -> ElasticReport | HubReport:
        """What the faults cost a run that is over."""
        return hub_report(folder) if isinstance(spec, Ray) else elastic_report(folder)


def _islands(run: Run, spec: Elastic) -> list[str]:
    return [island_name(number) for number in range(spec.processes or run.cluster.islands)]


class FaultHooks(ProcessHooks):
    """Injects faults into the processes of an elastic run, and starts them in network namespaces if links are to fail."""

    def __init__(self, script: FaultScript, folder: Path, network: NamespaceNetwork | None) -> None:
        self.injector = FaultInjector(script, folder / CHAOS_LOG, links=None if network is None else network.links)
        self.sinks = [self.injector]
        self._network, self._update_faults = network, None
        if network is not None:
            self.host = network.address
            self.joining = "the islands are in network namespaces, whose links fail as the script says: no other machine can join"
        if script.update_faults:
            self._update_faults = folder / "chaos.json"
            self._update_faults.write_text(script.to_text(), "utf-8")

    def command(self, name: str, command: Sequence[str]) -> Sequence[str]:
        if self._update_faults is not None and name != LIGHTHOUSE:
            command = faulty_island_command(command, self._update_faults)
        return command if self._network is None else self._network.inside(name, command)

    def step(self, now_s: float, processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
        self.injector.step(now_s, processes)
