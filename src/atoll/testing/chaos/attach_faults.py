"""Fault scripts attached to runs: `atoll chaos` passes a RunFaults to the driver."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import ConfigError
from atoll.engines.elastic.spec import Elastic, island_name
from atoll.engines.elastic.supervisor import ProcessHooks
from atoll.engines.ray.spec import Ray
from atoll.engines.run_lifecycle import RunTask
from atoll.engines.spec import EngineSpec
from atoll.runs.run_settings import Run
from atoll.testing.chaos.fault_injector import FaultInjector
from atoll.testing.chaos.faults import CHAOS_LOG, LIGHTHOUSE, FaultScript
from atoll.testing.chaos.ray_faults import check_ray_script, inject_ray_faults
from atoll.testing.chaos.reports import ElasticReport, HubReport, elastic_report, hub_report
from atoll.testing.network_namespaces import NetworkNamespace, ShapedLink, inside_namespace, star_network, unavailable_reason


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
        self.script.check_names(_processes(run, spec))
        reason = unavailable_reason() if self.script.links else None
        if reason is not None:
            raise ConfigError(
                f"a fault script has link faults, which need network namespaces, and {reason}. Leave out Cut, "
                f"CutOneWay, CutPair and Slow, or run it "
                f"where namespaces can be created."
            )

    @contextmanager
    def attach(self, task: RunTask) -> Iterator[ProcessHooks | FaultInjector]:
        """Inject the faults while the context is open, and revert them at its end."""
        folder, spec = task.folder.path, task.spec
        with ExitStack() as stack:
            if not isinstance(spec, Elastic):
                yield stack.enter_context(inject_ray_faults(self.script, folder))
                return
            namespaces: NamespacesOfProcesses = {}
            if self.script.links:
                namespaces = stack.enter_context(star_network(_processes(task.run, spec)))
                stack.enter_context(inside_namespace(namespaces[LIGHTHOUSE][0]))
            hooks = FaultHooks(self.script, folder, namespaces)
            stack.callback(hooks.injector.close)
            yield hooks

    @staticmethod
    def report(folder: Path, spec: EngineSpec) -> ElasticReport | HubReport:
        """What the faults cost a run that is over."""
        return hub_report(folder) if isinstance(spec, Ray) else elastic_report(folder)


def _processes(run: Run, spec: Elastic) -> list[str]:
    return [LIGHTHOUSE, *(island_name(number) for number in range(spec.processes or run.cluster.islands))]


NamespacesOfProcesses = Mapping[str, tuple[NetworkNamespace, NetworkNamespace]]
"""Both ends of each process's link, by its name: its own namespace, and the one at the center of the star."""


class FaultHooks(ProcessHooks):
    """Injects faults into the processes of an elastic run, and starts them in network namespaces if links are to fail."""

    def __init__(self, script: FaultScript, folder: Path, namespaces: NamespacesOfProcesses) -> None:
        links = {name: ShapedLink(ends) for name, ends in namespaces.items()}
        self.injector = FaultInjector(script, folder / CHAOS_LOG, links=links)
        self.sinks = [self.injector]
        self._namespaces, self._update_faults = namespaces, None
        if namespaces:
            self.host = namespaces[LIGHTHOUSE][0].address
            self.joining = "the islands are in network namespaces, whose links fail as the script says: no other machine can join"
        if script.update_faults:
            self._update_faults = folder / "chaos.json"
            self._update_faults.write_text(script.to_text(), "utf-8")

    def command(self, name: str, command: Sequence[str]) -> Sequence[str]:
        if self._update_faults is not None and name != LIGHTHOUSE:
            command = [*command, "--faults", str(self._update_faults)]
        return self._namespaces[name][0].inside(command) if self._namespaces else command

    def step(self, now_s: float, processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
        self.injector.step(now_s, processes)
