"""Elastic runs, from Python: begun in a new folder, or gone on with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from atoll.core.config.json_records import from_json, to_json
from atoll.core.config.type_checks import check_type
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Sink
from atoll.engines.driver import Result, is_finished, refuse_impossible, resume
from atoll.engines.elastic.rendezvous import free_port, is_free
from atoll.engines.elastic.spec import Elastic, read_elastic, write_elastic
from atoll.engines.elastic.state_version import refuse_unreplicated
from atoll.engines.elastic.supervisor import Inside, Supervisor, as_it_is, island_name
from atoll.engines.processes.spec import placed, refuse_too_many_devices
from atoll.engines.warm_start import Cache, load_data, warm_up
from atoll.runs.folder import RunFolder, default_path
from atoll.runs.run import Run
from atoll.runs.workloads import plain_workload
from atoll.telemetry.sinks import Fanout

if TYPE_CHECKING:
    from atoll.testing.chaos.fault_injector import FaultInjector
    from atoll.testing.chaos.faults import FaultScript


def create_elastic(run: Run, place: Elastic, folder: Path, command: Sequence[str]) -> Path:
    """A new folder for this run. What is impossible is refused before it is there."""
    mine = placed(run, place.processes or run.cluster.islands)
    refuse_inelastic(mine)
    refuse_too_many_devices(mine, place.devices)
    refuse_impossible(mine.resolved, None, Cache())
    RunFolder.create(folder, to_json(mine), list(command))
    write_elastic(folder, place)
    return folder


def refuse_inelastic(run: Run) -> None:
    """Refuse what islands that come and go cannot do."""
    if run.inside is not None or run.cluster.devices_per_island > 1:
        raise ConfigError(
            f"cluster.devices_per_island={run.cluster.devices_per_island} with --elastic: an island is one process there. Use "
            f"cluster.devices_per_island=1, or --engine dist alone."
        )
    algorithm: Any = run.resolved.algorithm
    if run.resolved.train.precision == "all-bf16":
        raise ConfigError("train.precision=all-bf16 with --elastic: deltas are of full weights. Use bf16 or fp32.")
    refuse_unreplicated(algorithm, algorithm.init(Tree.of({"w": torch.zeros(1)}), _Alone()))


class _Alone:
    """Peers of a run that is only looked at."""

    rank, size = 0, 1


def refuse_strangers(script: FaultScript | None, place: Elastic, run: Run) -> None:
    """Refuse a script that is to happen to processes which the run does not start, or to lines that it cannot have."""
    if script is None:
        return
    from atoll.testing.chaos.faults import LIGHTHOUSE
    from atoll.testing.chaos.network_links import check_links

    names = [LIGHTHOUSE, *map(island_name, range(place.processes or run.cluster.islands))]
    strangers = sorted(script.victims - set(names))
    if strangers:
        raise ConfigError(
            f"a script has {', '.join(strangers)} as victims, and the run starts {', '.join(names)}. Name some of these."
        )
    check_links(script, names)


def place_again(before: Elastic, given: Mapping[str, Any]) -> Elastic:
    """How a run goes on, by how it was carried out before and by what is given now. Its port stays, so that islands elsewhere find
    it again, unless somebody else has it."""
    port = before.port if is_free(given.get("host", before.host), before.port) else 0
    return Elastic(**{**vars(before), "port": port, **given})


def keep_going(
    folder: Path,
    place: Elastic,
    *,
    say: Callable[[str], object],
    sinks: Sequence[Sink] = (),
    chaos: FaultScript | None = None,
    started: Callable[[Supervisor], object] = lambda supervisor: None,
) -> None:
    """Have islands on this machine go on with the run in this folder, and wait for them.

    Args:
        folder: of the run.
        place: how.
        say: takes what a person may want to know.
        sinks: who takes the events.
        chaos: what is to go wrong with it, on purpose.
        started: is given whoever watches the islands, before it starts them.
    """
    opened = RunFolder.open(folder)
    run = from_json(opened.run_json)
    refuse_too_many_devices(run, place.devices)
    with opened.lock(), Fanout(list(sinks)) as sink:
        # The work stays that of the islands that the run was planned for, whoever does it.
        place = replace(place, processes=place.processes or run.cluster.islands, port=place.port or free_port(place.host))
        write_elastic(folder, place)
        if run.train.warm_start_steps:  # made once, before the islands that all begin with it
            resolved = run.resolved
            plain = plain_workload(resolved, load_data(resolved, Cache()))
            warm_up(resolved, plain, file=opened.warm_start, cache=None, sink=sink)
        with _broken(chaos, folder, place) as (breaks, placed_there, inside):
            supervisor = Supervisor(run, placed_there, folder, say=say, sinks=[sink], chaos=breaks, inside=inside)
            started(supervisor)
            if inside is as_it_is:
                say(f"others join this run with: atoll run --join {supervisor.address}")
            else:
                say("the islands are in network namespaces, with lines that break as the script says: nobody else can join")
            supervisor.keep_going()


@contextmanager
def _broken(script: FaultScript | None, folder: Path, place: Elastic) -> Iterator[tuple[FaultInjector | None, Elastic, Inside]]:
    """What carries out a script on the run in this folder, and where its processes are: lines that can break need two ends."""
    if script is None:
        yield None, place, as_it_is
        return
    from atoll.testing.chaos.fault_injector import FaultInjector
    from atoll.testing.chaos.faults import CHAOS_LOG
    from atoll.testing.chaos.network_links import namespace_network

    if not script.links:
        yield FaultInjector(script, folder / CHAOS_LOG), place, as_it_is
        return
    with namespace_network([island_name(number) for number in range(place.processes or 0)]) as there:
        yield FaultInjector(script, folder / CHAOS_LOG, links=there.links), replace(place, host=there.address), there.inside


def run_elastic(
    place: Elastic,
    run: Run,
    *,
    out: str | Path | None = None,
    command: Sequence[str] | None = None,
    chaos: FaultScript | None = None,
) -> Result:
    """Carries out a Run by islands that come and go, in a new folder.

    Args:
        place: how many, and how.
        run: what to do; `processes` overrides the number of its islands.
        out: the folder; by default a new one under runs/.
        command: how the run was asked for, for the record.
        chaos: what is to go wrong with it, on purpose.
    """
    check_type("place", place, Elastic)
    check_type("run", run, Run)
    folder = Path(out or default_path(run.recipe, run.seed)).expanduser()
    command = list(command or sys.argv)
    refuse_strangers(chaos, place, run)
    create_elastic(run, place, folder, command)
    keep_going(folder, place, say=lambda text: None, chaos=chaos)
    return resume(folder, command=command)


def resume_elastic(
    out: str | Path, place: Elastic | None = None, *, command: Sequence[str] | None = None, chaos: FaultScript | None = None
) -> Result:
    """Goes on with an elastic run, by as many islands or others; see `run_elastic`."""
    folder, command = Path(out).expanduser(), list(command or sys.argv)
    before = read_elastic(folder)
    if before is None:
        raise ConfigError(f"{folder} is no run of islands that come and go. Use atoll.resume, or atoll.resume_on.")
    if not is_finished(RunFolder.open(folder)):
        place = place or place_again(before, {})
        refuse_strangers(chaos, place, from_json(RunFolder.open(folder).run_json))
        RunFolder.open(folder).resumed(command)
        keep_going(folder, place, say=lambda text: None, chaos=chaos)
    return resume(folder, command=command)
