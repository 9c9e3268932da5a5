"""What the launcher of an elastic run refuses."""

from dataclasses import replace

import pytest

import atoll
from atoll import recipes
from atoll.core.errors import ConfigError
from atoll.engines.elastic.launch import joining_lines
from atoll.engines.elastic.spec import Elastic
from atoll.testing.simulated_runs import Regression


def test_a_users_workload_is_refused_before_there_is_a_folder(tmp_path):
    with pytest.raises(ConfigError, match="a user's workload lives in this process"):
        atoll.run(recipes.toy_sync(), engine=atoll.Elastic(processes=2), workload=Regression(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_says_how_to_join_it_and_what_a_trusted_network_means(tmp_path):
    secured = Elastic(listen="192.0.2.7:7000")
    assert secured.secured
    assert joining_lines(secured, tmp_path, "192.0.2.7:7000").startswith(f"join this run: `atoll invite {tmp_path}` here")
    trusted = replace(secured, network="trusted")
    assert not trusted.secured
    text = joining_lines(trusted, tmp_path, "192.0.2.7:7000")
    assert "--join 192.0.2.7:7000 --set engine.network=trusted" in text
    assert "every machine that reaches the ports of 192.0.2.7 can read, replace and stop this run" in text


@pytest.mark.parametrize(
    ("settings", "secured"),
    [
        ({}, False),
        ({"listen": "localhost:7000"}, False),
        ({"listen": "127.0.0.1:0", "advertise": "203.0.113.5:7000"}, True),
        ({"listen": "0.0.0.0:7000", "advertise": "203.0.113.5:7000"}, True),
        ({"listen": "box.example:7000"}, True),
    ],
)
def test_a_run_beyond_loopback_has_a_gateway(settings, secured):
    assert Elastic(**settings).secured == secured


@pytest.mark.parametrize(
    "settings",
    [
        {"listen": "0.0.0.0:7000"},
        {"listen": "0.0.0.0:7000", "network": "trusted", "advertise": "203.0.113.5:7000"},
        {"listen": "192.0.2.7:7000", "network": "trusted", "advertise": "203.0.113.5:7000"},
        {"listen": "192.0.2.7:7000", "advertise": "203.0.113.5:7000,"},
        {"listen": "192.0.2.7:7000", "network": "vpn"},
    ],
)
def test_addresses_that_no_machine_could_dial_are_refused(settings):
    with pytest.raises(ConfigError):
        Elastic(**settings)
