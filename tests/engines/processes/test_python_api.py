"""What runs on several processes is given from Python."""

import pytest

from atoll import recipes
from atoll.core.errors import ConfigError
from atoll.engines.elastic.launch import run_elastic
from atoll.engines.elastic.spec import Elastic
from atoll.engines.processes.python_api import run_on
from atoll.engines.processes.spec import Dist
from atoll.engines.ray.launch import run_on_ray
from atoll.engines.ray.spec import Ray

PLACES = [(run_on, Dist(processes=2)), (run_elastic, Elastic(processes=2)), (run_on_ray, Ray(processes=2))]


@pytest.mark.parametrize(("function", "place"), PLACES)
def test_a_place_and_a_run_in_the_wrong_order_are_refused_before_there_is_a_folder(function, place, tmp_path):
    kind = type(place).__name__
    with pytest.raises(ConfigError, match=rf"place is a Run, not an? {kind}\. Give one, such as atoll.{kind}\(\.\.\.\)"):
        function(recipes.demo_diloco(), place, out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"run='demo-diloco' is not a Run\. Give one, such as atoll.recipes.demo_diloco\(\)"):
        function(place, "demo-diloco", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
