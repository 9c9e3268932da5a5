"""Modules in half precision: master weights keep small updates, and parameters that are not trained have none."""

from dataclasses import replace

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Work
from atoll.engines.simulator.engine import SimEngine
from atoll.engines.simulator.member_work import SimSetup
from atoll.optim.adam import Adam, AdamW
from atoll.optim.sgd import SGD, Momentum, Nesterov
from atoll.optim.torch_optimizers import TorchOptimizer
from atoll.replica.evaluator import Evaluator
from atoll.replica.flat_parameters import trainable_weights
from atoll.replica.local_replica import LocalReplica, RoundStart, torch_threads
from atoll.replica.master_weights import MasterWeights, cast_parameters, initial_weights
from atoll.runs.cluster import Cluster
from atoll.testing.simulated_runs import Recorder, Regression, run_engine, simulate

HALF = torch.bfloat16
RULES = [AdamW(lr=1e-5), Adam(lr=1e-5), SGD(lr=1e-5), Momentum(lr=1e-5), Nesterov(lr=1e-5)]


@pytest.fixture(autouse=True)
def one_thread():
    with torch_threads(1):
        yield


class InHalf:
    """A workload whose loss casts what it reads to the module's own precision."""

    def __init__(self, inner):
        self.inner, self.batches = inner, inner.batches

    def module(self):
        return self.inner.module()

    def loss(self, module, batch):
        inputs, targets = batch
        return (module(inputs.to(next(module.parameters()).dtype)).squeeze(1).float() - targets).square().mean()

    def evaluate(self, module):
        return {"loss": float(self.loss(module, self.batches.all_examples()))}


WORKLOAD = InHalf(Regression(hidden=4))


def work(start=0):
    return Work(shard=0, start=start, schedule=start, examples=1)


def replica(rule=RULES[0], **options):
    made = LocalReplica(WORKLOAD, optimizer=rule, dtype=HALF, **options)
    made.load(initial_weights(WORKLOAD, "cpu", HALF))
    return made


def test_parameters_are_cast_and_buffers_stay_as_they_are():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    module[0].bias.requires_grad_(False)
    cast_parameters(module, HALF)
    assert {p.dtype for p in module.parameters()} == {HALF}
    assert module[1].running_mean.dtype == torch.float32


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_updates_too_small_for_half_precision_add_up(rule):
    one = replica(rule)
    before = one.params()
    one.train(1, work())
    assert one.weights.equals(before), "one step alone is lost in the module"
    step = (one.params() - before).norm()
    one.train(400, work(1))
    assert not one.weights.equals(before)
    assert (one.params() - before).norm() > 50 * step
    assert one.weights.equals(one.params()), "the module holds the masters, rounded"


def test_master_weights_keep_the_precision_of_loaded_weights():
    full = initial_weights(WORKLOAD, "cpu", HALF)
    assert full.flat.dtype == torch.float32
    assert full.layout == replica().weights.layout
    assert not full.equal(full.cast(HALF).wide()), "these weights have digits that half precision has not"
    still = replica(SGD(lr=0.0))
    assert still.params().equal(full)
    still.train(1, work())
    assert still.params().equal(full)


def test_a_replica_that_computes_gradients_only_allocates_no_master_weights():
    asked, trained = replica(), replica()
    asked.gradient(work())
    trained.train(1, work())
    assert not asked.tensors()["optimizer"]
    assert sum(t.nbytes for t in trained.tensors()["optimizer"]) == 12 * trained.weights.layout.numel
    assert asked.params().flat.dtype == HALF


def test_clipping_scales_the_gradients_of_master_weights():
    rule = SGD(lr=0.1)
    free, clipped = replica(rule), replica(rule, clip_norm=1e-3)
    before = free.params()
    for one in (free, clipped):
        one.train(1, work())
    assert (clipped.params() - before).norm() == pytest.approx(1e-4, rel=1e-3)
    assert (free.params() - before).norm() > 1e-3


@pytest.mark.parametrize("fresh", [False, True])
def test_a_resumed_replica_continues_bit_for_bit(fresh):
    straight, saved = (replica(AdamW(lr=0.01), round_start=RoundStart(fresh_optimizer=fresh)) for _ in range(2))
    for one in (straight, saved):
        one.train(3, work())
    resumed = replica(AdamW(lr=0.01), round_start=RoundStart(fresh_optimizer=fresh))
    resumed.restore(saved.state())
    resumed.load(saved.params())
    straight.load(straight.params())
    for one in (straight, resumed):
        one.train(3, work(3))
    assert resumed.params().equal(straight.params())
    assert resumed.params().flat.dtype == torch.float32


def half_run(algorithm, workload=WORKLOAD):
    sink = Recorder()
    engine = SimEngine(
        algorithm,
        SimSetup(
            cluster=Cluster(islands=2),
            params=initial_weights(workload, "cpu", HALF),
            batches=workload.batches,
            make_replica=lambda island: LocalReplica(workload, optimizer=AdamW(lr=0.01), dtype=HALF),
            evaluate=Evaluator(workload, dtype=HALF),
            sink=sink,
            steps=20,
        ),
    )
    return engine, run_engine(engine)


@pytest.mark.parametrize(
    "algorithm", [DiLoCo(inner_steps=5), DDP(optimizer=AdamW(lr=0.01))], ids=lambda algorithm: type(algorithm).__name__
)
def test_algorithms_train_a_module_in_half_precision_nearly_as_well(algorithm):
    engine, finished = half_run(algorithm)
    single = simulate(algorithm, steps=20, workload=WORKLOAD, inner=AdamW(lr=0.01), cluster=Cluster(islands=2))
    assert engine.params.flat.dtype == torch.float32
    assert finished.val_loss == pytest.approx(single.finished.val_loss, rel=0.05)


def test_an_asynchronous_worker_has_masters_too():
    workload = Regression(dtype=HALF)
    done = simulate(AsyncLocalSGD(inner_steps=2), steps=8, workload=workload, params=Tree.of(workload.module()))
    workers = done.engine.workers.values()
    assert {worker.replica.params().flat.dtype for worker in workers} == {torch.float32}


def test_weights_are_evaluated_in_half_precision():
    full = initial_weights(WORKLOAD, "cpu", HALF)
    rounded = Tree(full.layout, full.cast(HALF).wide().flat)
    judge = Evaluator(WORKLOAD, dtype=HALF)
    assert judge(full) == judge(rounded)
    assert next(judge.module.parameters()).dtype == HALF


def test_a_step_of_torchs_optimizer_is_the_rules_at_the_schedules_rate_and_checks_the_rule_no_more():
    rule, rates, stepped = TorchOptimizer(name="NAdam", lr=0.02), (0.01, 0.003, 0.0), []
    weights = trainable_weights(cast_parameters(WORKLOAD.module(), HALF))
    masters = MasterWeights(weights, rule, initial_weights(WORKLOAD, "cpu", HALF))
    expected, state = initial_weights(WORKLOAD, "cpu", HALF), rule.init(weights.layout)
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: stepped.append(optimizer))
    for number, rate in enumerate(rates):
        weights.gather_gradient()
        weights.gradients()[0].fill_(0.5 + number)
        masters.step(rate, None)
    hook.remove()
    for number, rate in enumerate(rates):
        gradient = expected.zeros() + (0.5 + number)
        expected, state = replace(rule, lr=rate).update(expected, gradient, state)
    assert masters.read(weights.layout).same_bits(expected)
    assert len(stepped) == len(rates), "a step to try the rule would be another"
