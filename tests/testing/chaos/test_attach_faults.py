"""Faults are refused if the run has no such process or link, or if the machine cannot create network namespaces."""

import os

import pytest

from atoll import recipes
from atoll.core.errors import ConfigError
from atoll.engines.elastic.spec import Elastic
from atoll.testing.chaos.attach_faults import RunFaults
from atoll.testing.chaos.faults import Cut, ExternalFault, FaultScript, Kill, Slow, TimedFault

CUT = Cut(link="island-0001", for_s=1.0)


def check(*faults: ExternalFault) -> None:
    script = FaultScript(faults=tuple(TimedFault(at_s=1.0, fault=fault) for fault in faults))
    RunFaults(script).check(recipes.demo_diloco(), Elastic(processes=2))


def test_faults_of_unknown_processes_and_links_are_refused():
    with pytest.raises(
        ConfigError, match=r"names island-0007, island-0008; the run starts lighthouse, island-0000, island-0001\. Name one"
    ):
        check(CUT, Slow(link="island-0007", mbit_per_s=1.0, for_s=1.0), Kill(victim="island-0008"))


def test_without_namespaces_only_link_faults_are_refused(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name, path=None: f"/sbin/{name}")
    with pytest.raises(
        ConfigError, match=r"network namespaces, and (only root can create|network namespaces need Linux).*Leave out Cut"
    ):
        check(CUT)
    check(Kill(victim="island-0000"))
