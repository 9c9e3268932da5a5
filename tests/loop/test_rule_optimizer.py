"""Which steps count, and which learning rate applies."""

import pytest
import torch

import atoll
from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD
from atoll.testing.simulated_runs import Regression

WORKLOAD = Regression(hidden=3)


def loss_of(model, step):
    return WORKLOAD.loss(model, WORKLOAD.batches.batch(0, step))


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_do_not_count(fused):
    """A GradScaler steps a fused optimizer in any case, and sets found_inf."""
    model = WORKLOAD.module()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with atoll.islands(model, optimizer, DiLoCo(inner_steps=2)) as islands:
        for step in range(5):
            before = Tree.of(model)
            scaler.scale(loss_of(model, step) * (float("inf") if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == 1:
                assert Tree.of(model).equal(before)
        assert (islands.steps, islands.rounds) == (4, 2)


def test_micro_batches_that_a_scaler_skips_do_not_count():
    model = WORKLOAD.module()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with atoll.islands(model, None, DDP(optimizer=SGD(lr=0.1))) as islands:
        for step in range(4):
            scaler.scale(loss_of(model, step) * (float("nan") if step == 2 else 1.0)).backward()
            scaler.unscale_(islands.optimizer)
            scaler.step(islands.optimizer)
            scaler.update()
            islands.optimizer.zero_grad()
    assert (islands.steps, islands.rounds) == (3, 3)
    expected = WORKLOAD.module()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in (0, 1, 3):
        loss_of(expected, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(Tree.of(model).flat, Tree.of(expected).flat)


@pytest.mark.parametrize("unscales", [False, True])
def test_gradients_that_a_scaler_skips_do_not_add_to_the_next_ones(unscales):
    """Without zero_grad(), gradients that stayed would make all later ones non-finite."""
    model, expected = WORKLOAD.module(), WORKLOAD.module()
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    with atoll.islands(model, None, DDP(optimizer=SGD(lr=0.1))) as islands:
        for step in range(20):
            scaler.scale(loss_of(model, step) * (float("inf") if step in (3, 4) else 1.0)).backward()
            if unscales:
                scaler.unscale_(islands.optimizer)
            scaler.step(islands.optimizer)
            scaler.update()
    assert (islands.steps, islands.rounds) == (18, 18)
    assert scaler.get_scale() == 4.0
    with atoll.islands(expected, None, DDP(optimizer=SGD(lr=0.1))) as islands:
        for step in sorted(set(range(20)) - {3, 4}):
            loss_of(expected, step).backward()
            islands.step()
    assert Tree.of(model).equal(Tree.of(expected))  # scales are powers of two


def test_a_compiled_step_counts_and_the_hook_is_not_compiled():
    model, graphs = WORKLOAD.module(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(optimizer.step, backend=backend)
    with atoll.islands(model, optimizer, DiLoCo(inner_steps=2)) as islands:
        for number in range(4):
            loss_of(model, number).backward()
            step()
            optimizer.zero_grad()
    assert (islands.steps, islands.rounds) == (4, 2)
    assert len(graphs) == 1


def test_accumulated_gradients_are_one_step():
    model = WORKLOAD.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.islands(model, optimizer, DiLoCo(inner_steps=2)) as islands:
        for step in range(12):
            (loss_of(model, step) / 3).backward()
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    assert (islands.steps, islands.rounds) == (4, 2)


@pytest.mark.parametrize("algorithm", [DDP(optimizer=SGD(lr=0.1)), ZeRO1(optimizer=SGD(lr=0.1))])
def test_a_schedulers_rate_applies_from_the_next_step_as_in_torch(algorithm):
    model, expected = WORKLOAD.module(), WORKLOAD.module()
    reference = torch.optim.SGD(expected.parameters(), lr=0.1)
    with atoll.islands(model, None, algorithm) as islands:
        schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5) for o in (reference, islands.optimizer)]
        for step in range(7):
            loss_of(model, step).backward()
            islands.optimizer.step()
            loss_of(expected, step).backward()
            reference.step()
            reference.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
    assert islands.optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"] == 0.1 / 8
    torch.testing.assert_close(Tree.of(model).flat, Tree.of(expected).flat, rtol=1e-6, atol=1e-7)


def test_acco_uses_one_rate_for_estimate_and_commit():
    """A rate of 0 that is set during a round applies from the next round on."""
    model = WORKLOAD.module()
    with atoll.islands(model, None, ACCO(optimizer=SGD(lr=0.1))) as islands:
        moved = []
        for step in range(7):
            loss_of(model, step).backward()
            rounds, before = islands.rounds, Tree.of(model)
            if step == 3:
                islands.optimizer.param_groups[0]["lr"] = 0.0
            islands.step()
            if islands.rounds > rounds:
                moved.append(not Tree.of(model).equal(before))
    assert moved == [True, True, False]


def test_the_rules_own_schedule_is_shown_in_param_groups():
    model = WORKLOAD.module()
    schedule = Cosine(lr=1.0, steps=4, warmup=2)
    islands = atoll.islands(model, None, DDP(optimizer=AdamW(lr=schedule)))
    seen = []
    with islands:
        for step in range(4):
            seen.append(islands.optimizer.param_groups[0]["lr"])
            loss_of(model, step).backward()
            islands.step()
    assert seen == [schedule(step) for step in range(4)]


def test_groups_with_different_rates_are_refused():
    islands = atoll.islands(WORKLOAD.module(), None, DDP(optimizer=SGD(lr=0.1)))
    islands.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.2})
    with pytest.raises(ConfigError, match=r"learning rates \[0.1, 0.2\]: it supports one"), islands:
        pass


def test_a_closure_is_refused():
    model = WORKLOAD.module()
    with (
        pytest.raises(ConfigError, match="stepped with a closure, as Lightning's automatic optimization does"),
        atoll.islands(model, None, DDP(optimizer=SGD(lr=0.1))) as islands,
    ):
        islands.optimizer.step(lambda: 0.0)


def test_with_weigh_tokens_a_micro_batch_is_weighted_by_its_tokens():
    model, expected = WORKLOAD.module(), WORKLOAD.module()
    with atoll.islands(model, None, DDP(optimizer=SGD(lr=0.1), accumulation=2, weigh="tokens")) as islands:
        loss_of(model, 0).backward()
        with pytest.raises(ConfigError, match=r"call islands.step\(tokens="):
            islands.step()
        islands.step(tokens=10)
        loss_of(model, 1).backward()
        islands.step(tokens=30)
    ((loss_of(expected, 0) + 3 * loss_of(expected, 1)) / 4).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    torch.testing.assert_close(Tree.of(model).flat, Tree.of(expected).flat)
