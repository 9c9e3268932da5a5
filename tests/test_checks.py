import pytest

from atoll.algorithms.diloco import DiLoCo
from atoll.engines.sim.world import Cluster
from atoll.errors import ConfigError
from atoll.runs.run import Train


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DiLoCo(inner_steps=2, weighting="exampels"), r"weighting='exampels' is none of 'uniform', 'examples'"),
        (lambda: DiLoCo(inner_steps=2, missed="globl"), r"missed='globl'"),
        (lambda: DiLoCo(inner_steps=2.5), r"inner_steps=2.5 is not a whole number"),
        (lambda: Cluster(topology="mesh"), r"topology='mesh' is none of 'ring', 'star'"),
        (lambda: Cluster(pool="doublng"), r"pool='doublng'"),
        (lambda: Train(steps=1, batch_size=1, precision="fp16"), r"precision='fp16'"),
        (lambda: Train(steps=1, batch_size=1, device="gpu"), r"device='gpu'"),
        (lambda: Train(steps=1, batch_size=True), r"batch_size=True is not a whole number"),
    ],
)
def test_what_is_misspelt_in_python_is_refused_as_on_the_command_line(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
