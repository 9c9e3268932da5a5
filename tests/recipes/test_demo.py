"""The demo's recipes do the same work."""

from dataclasses import fields, replace

from atoll import recipes
from atoll.algorithms.acco import ACCO
from atoll.algorithms.eager_updates import Eager
from atoll.algorithms.streaming import Streaming
from atoll.optim.sgd import SGD, Nesterov
from atoll.optim.torch_optimizers import Muon
from atoll.runs.cluster import step_times


def test_the_demo_of_two_levels_does_the_demos_work_on_twice_the_devices():
    one, two = recipes.recipe("demo-diloco"), recipes.recipe("demo-two-level")
    assert two.algorithm == one.algorithm
    assert two.inside == ACCO()
    assert two.cluster.devices == 2 * one.cluster.islands
    assert two.cluster.devices * two.train.batch_size == one.cluster.islands * one.train.batch_size
    assert two.train.batch_size * two.train.warm_start_steps == one.train.batch_size * one.train.warm_start_steps
    assert (two.train.steps, two.optimizer, two.model, two.data) == (one.train.steps, one.optimizer, one.model, one.data)
    assert two.cluster.link == one.cluster.link
    assert two.cluster.inside.bandwidth_mbit_per_s >= 10 * two.cluster.link.bandwidth_mbit_per_s
    seconds = [time / 16 for time in step_times(one.cluster.step_time_s)]  # for one sample
    assert [time / 8 for time in two.cluster.step_time_s] == seconds


def test_the_demo_of_streaming_differs_from_diloco_in_fragments_overlap_and_mixing_alone():
    one, two = recipes.recipe("demo-diloco"), recipes.recipe("demo-streaming")
    assert replace(two, recipe=one.recipe, algorithm=one.algorithm) == one
    alike = {field.name for field in fields(two.algorithm)} - {"fragments", "overlap", "mixing", "split"}
    assert {name: getattr(two.algorithm, name) for name in alike} == {name: getattr(one.algorithm, name) for name in alike}
    assert two.algorithm.split == Streaming(inner_steps=20).split
    assert (two.algorithm.fragments, two.algorithm.overlap) != (1, 0)


def test_the_demos_of_small_exchanges_differ_from_diloco_in_their_method_alone():
    diloco = recipes.recipe("demo-diloco")
    eager, sparse, muloco = (recipes.recipe(f"demo-{name}") for name in ("eager", "sparseloco", "muloco"))
    for run in (eager, sparse):
        assert replace(run, recipe=diloco.recipe, algorithm=diloco.algorithm) == diloco
    assert eager.algorithm == Eager(inner_steps=20, outer=Nesterov(lr=0.4, momentum=0.6))
    assert sparse.algorithm == replace(diloco.algorithm, outer=SGD(lr=1.0), codec="topk", feedback=0.95)
    assert replace(muloco, recipe=diloco.recipe, algorithm=diloco.algorithm, optimizer=diloco.optimizer) == diloco
    assert muloco.optimizer == Muon(lr=diloco.optimizer.lr)
    assert muloco.algorithm == replace(diloco.algorithm, outer=Nesterov(lr=0.7, momentum=0.6))
