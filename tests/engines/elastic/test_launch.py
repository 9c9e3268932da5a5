"""What the launcher of an elastic run refuses."""

import pytest

import atoll
from atoll import recipes
from atoll.core.errors import ConfigError
from atoll.testing.simulated_runs import Regression


def test_a_users_workload_is_refused_before_there_is_a_folder(tmp_path):
    with pytest.raises(ConfigError, match="a user's workload lives in this process"):
        atoll.run(recipes.toy_sync(), engine=atoll.Elastic(processes=2), workload=Regression(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
