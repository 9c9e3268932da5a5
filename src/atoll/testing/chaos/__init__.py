"""A kit for breaking runs whose processes come and go: faults as values, by a script or at random from a seed, and what was lost.

    faults.py     what can go wrong, and when, as values and as a file
    breaking.py   makes it happen to processes and lines, and writes down what it did
    inside.py     what goes wrong inside an island's own process: damage on the wire, deltas that nobody should take
    lines.py      network namespaces joined by lines that can be cut and shaped
    ray_run.py    hub and workers of a run on Ray, to be broken like islands
    report.py     what became of the run            words.py   in words

>>> at_random(seed=7, victims=["island-0000", "island-0001"], every_s=20.0, until_s=60.0)
(At(at_s=20.0, fault=Kill(victim='island-0000')), At(at_s=40.0, fault=Kill(victim='island-0001')))
"""

from atoll.testing.chaos.breaking import Chaos, Process
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
from atoll.testing.chaos.inside import Spoiler
from atoll.testing.chaos.lines import Line
from atoll.testing.chaos.ray_run import HUB, RayProcess, ray_processes
from atoll.testing.chaos.report import CHAOS_LOG, Report, exactly_once, report_of
from atoll.testing.chaos.words import in_words

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
    "Kill",
    "Line",
    "Process",
    "RayProcess",
    "Report",
    "Script",
    "Slow",
    "Spoil",
    "Spoiler",
    "at_random",
    "exactly_once",
    "in_words",
    "ray_processes",
    "report_of",
    "spoils_at_random",
]
