"""A script that breaks lines is refused where there are none, and where there can be none."""

import os

import pytest

from atoll.core.errors import ConfigError
from atoll.testing.chaos import LIGHTHOUSE, At, Cut, Kill, Script, Slow
from atoll.testing.chaos.network_links import refuse_lines

NAMES = [LIGHTHOUSE, "island-0000", "island-0001"]
CUT = Script(faults=(At(at_s=1.0, fault=Cut(line="island-0001", for_s=1.0)),))


def test_lines_are_those_of_the_runs_processes():
    script = Script(faults=(*CUT.faults, At(at_s=2.0, fault=Slow(line="island-0007", mbit_per_s=1.0, for_s=1.0))))
    with pytest.raises(
        ConfigError, match=r"the lines of island-0007, and the run has those of lighthouse, island-0000, island-0001"
    ):
        refuse_lines(script, NAMES)


def test_where_no_namespaces_can_be_made_lines_are_refused_and_all_else_is_not(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name, path=None: f"/sbin/{name}")
    with pytest.raises(
        ConfigError, match=r"network namespaces, and (only root may make|network namespaces are Linux's).*Leave out what is Cut"
    ):
        refuse_lines(CUT, NAMES)
    refuse_lines(Script(faults=(At(at_s=1.0, fault=Kill(victim="island-0000")),)), NAMES)
