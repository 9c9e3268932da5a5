"""Steps are counted as they are taken, and a learning rate that is set from outside is the one that counts."""

import pytest
import torch

import atoll
from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.zero1 import ZeRO1
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
    """A fused optimizer is stepped all the same, and told to skip."""
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
def test_what_a_scaler_skips_is_dropped_and_does_not_spoil_what_comes(unscales):
    """Nobody calls zero_grad(): gradients that stayed would be added to the next ones, and be skipped with them for ever."""
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


def test_a_compiled_step_counts_and_what_islands_do_after_it_is_not_compiled_with_it():
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


def test_gradients_that_are_accumulated_are_one_step():
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
def test_a_rate_that_a_scheduler_sets_counts_from_the_next_step_on_as_with_torchs_own(algorithm):
    model, expected = WORKLOAD.module(), WORKLOAD.module()
    torchs = torch.optim.SGD(expected.parameters(), lr=0.1)
    with atoll.islands(model, None, algorithm) as islands:
        schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5) for o in (torchs, islands.optimizer)]
        for step in range(7):
            loss_of(model, step).backward()
            islands.optimizer.step()
            loss_of(expected, step).backward()
            torchs.step()
            torchs.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
    assert islands.optimizer.param_groups[0]["lr"] == torchs.param_groups[0]["lr"] == 0.1 / 8
    torch.testing.assert_close(Tree.of(model).flat, Tree.of(expected).flat, rtol=1e-6, atol=1e-7)


def test_acco_steps_at_one_rate_from_the_estimate_to_the_commit():
    """With a rate of 0 set during a round, the round still ends at its own rate, and the next one moves nothing."""
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


def test_a_schedule_of_the_rules_own_is_shown_where_trainers_look():
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
    with pytest.raises(ConfigError, match=r"learning rates \[0.1, 0.2\]: it knows one for all"), islands:
        pass


def test_a_closure_is_refused():
    model = WORKLOAD.module()
    with (
        pytest.raises(ConfigError, match="stepped with a closure, as Lightning's automatic optimization does"),
        atoll.islands(model, None, DDP(optimizer=SGD(lr=0.1))) as islands,
    ):
        islands.optimizer.step(lambda: 0.0)


def test_where_tokens_are_weighed_each_micro_batch_counts_for_its_own():
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
