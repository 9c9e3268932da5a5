"""Link faults are refused if the run has no such link, or the machine cannot create network namespaces."""

import os

import pytest

from atoll.core.errors import ConfigError
from atoll.testing.chaos.fault_injector import check_links
from atoll.testing.chaos.faults import LIGHTHOUSE, Cut, FaultScript, Kill, Slow, TimedFault

NAMES = [LIGHTHOUSE, "island-0000", "island-0001"]
CUT = FaultScript(faults=(TimedFault(at_s=1.0, fault=Cut(link="island-0001", for_s=1.0)),))


def test_a_link_of_an_unknown_process_is_refused():
    script = FaultScript(faults=(*CUT.faults, TimedFault(at_s=2.0, fault=Slow(link="island-0007", mbit_per_s=1.0, for_s=1.0))))
    with pytest.raises(ConfigError, match=r"the links of island-0007; the run has those of lighthouse, island-0000, island-0001"):
        check_links(script, NAMES)


def test_without_namespaces_only_link_faults_are_refused(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name, path=None: f"/sbin/{name}")
    with pytest.raises(
        ConfigError, match=r"network namespaces, and (only root can create|network namespaces need Linux).*Leave out Cut"
    ):
        check_links(CUT, NAMES)
    check_links(FaultScript(faults=(TimedFault(at_s=1.0, fault=Kill(victim="island-0000")),)), NAMES)
