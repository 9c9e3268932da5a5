"""Fault injection for elastic runs and runs on Ray: fault scripts, an injector, and reports of what the faults cost.

    faults.py           faults, and scripts of them, as values and as JSON; random scripts from a seed
    fault_injector.py   injects a script's faults into processes and links, and logs them
    update_faults.py    faults inside an island's process: corrupted messages, unusable deltas
    network_links.py    links between network namespaces that can be cut and shaped
    ray_faults.py       finds the hub and workers of a run on Ray, and injects faults in a thread
    reports.py          what the faults cost an elastic run, or a run with a hub

>>> random_faults(seed=7, victims=["island-0000", "island-0001"], every_s=20.0, until_s=60.0)
(TimedFault(at_s=20.0, fault=Kill(victim='island-0000')), TimedFault(at_s=40.0, fault=Kill(victim='island-0001')))
"""

from atoll.testing.chaos.fault_injector import FaultInjector
from atoll.testing.chaos.faults import (
    CHAOS_LOG,
    LIGHTHOUSE,
    Cut,
    Fault,
    FaultScript,
    Freeze,
    FullDisk,
    Kill,
    Slow,
    TimedFault,
    UpdateFault,
    random_faults,
    random_update_faults,
)
from atoll.testing.chaos.network_links import ShapedLink
from atoll.testing.chaos.ray_faults import HUB, RayFaultInjector, check_ray_script, ray_processes
from atoll.testing.chaos.reports import elastic_report, exactly_once_violations, hub_report, report_text
from atoll.testing.chaos.update_faults import UpdateCorrupter, interpose_update_faults

__all__ = [
    "CHAOS_LOG",
    "HUB",
    "LIGHTHOUSE",
    "Cut",
    "Fault",
    "FaultInjector",
    "FaultScript",
    "Freeze",
    "FullDisk",
    "Kill",
    "RayFaultInjector",
    "ShapedLink",
    "Slow",
    "TimedFault",
    "UpdateCorrupter",
    "UpdateFault",
    "check_ray_script",
    "elastic_report",
    "exactly_once_violations",
    "hub_report",
    "interpose_update_faults",
    "random_faults",
    "random_update_faults",
    "ray_processes",
    "report_text",
]
