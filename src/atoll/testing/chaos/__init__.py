"""A kit for breaking runs whose processes come and go: faults as values, by a script or at random from a seed, and what was lost.

    faults.py     what can go wrong, and when, as values and as a file
    breaking.py   makes it happen to processes and lines, and writes down what it did
    inside.py     what goes wrong inside an island's own process: damage on the wire, deltas that nobody should take
    lines.py      network namespaces joined by lines that can be cut and shaped; a run whose processes have one each
    ray_run.py    hub and workers of a run on Ray, to be broken like islands
    report.py     what became of the run            words.py   in words         hub_report.py   of a run with a hub

>>> at_random(seed=7, victims=["island-0000", "island-0001"], every_s=20.0, until_s=60.0)
(At(at_s=20.0, fault=Kill(victim='island-0000')), At(at_s=40.0, fault=Kill(victim='island-0001')))
"""

from atoll.testing.chaos.fault_injector import Chaos, Process
from atoll.testing.chaos.faults import (
    LIGHTHOUSE,
    At,
    Cut,
    Fault,
    Freeze,
    FullDisk,
    Kill,
    Script,
    Slow,
    Spoil,
    at_random,
    spoils_at_random,
)
from atoll.testing.chaos.hub_report import HubReport, hub_in_words, hub_report_of
from atoll.testing.chaos.in_process_faults import Spoiler
from atoll.testing.chaos.network_links import Line
from atoll.testing.chaos.ray_faults import HUB, RayChaos, RayProcess, ray_processes, refuse_on_ray
from atoll.testing.chaos.report import CHAOS_LOG, Report, exactly_once, report_of
from atoll.testing.chaos.report_text import in_words

__all__ = [
    "CHAOS_LOG",
    "HUB",
    "LIGHTHOUSE",
    "At",
    "Chaos",
    "Cut",
    "Fault",
    "Freeze",
    "FullDisk",
    "HubReport",
    "Kill",
    "Line",
    "Process",
    "RayChaos",
    "RayProcess",
    "Report",
    "Script",
    "Slow",
    "Spoil",
    "Spoiler",
    "at_random",
    "exactly_once",
    "hub_in_words",
    "hub_report_of",
    "in_words",
    "ray_processes",
    "refuse_on_ray",
    "report_of",
    "spoils_at_random",
]
