"""Weights and updates in a codec: hub and worker decode the same bits, feedback loses nothing, and bytes are the formula's."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.engines.async_hub import AsyncHub, Push, Refusal
from atoll.engines.hub_encoding import decode_update, decode_weights, encode_update, encode_weights
from atoll.optim.codecs import CODECS
from atoll.optim.sgd import SGD

NAMES = [name for name, codec in CODECS.items() if codec is not None]
NUMEL = 1000


def grid(seed, numel=NUMEL):
    """Multiples of 1/2048 from -1 to 1, so that single precision adds them exactly."""
    return Tree.of({"w": torch.randint(-2048, 2049, (numel,), generator=torch.Generator().manual_seed(seed)) / 2048})


def hub_of(codec, **settings):
    algorithm = AsyncLocalSGD(inner_steps=2, outer=SGD(lr=1.0), codec=codec, **settings)
    return AsyncHub(algorithm, grid(99), examples=[100] * 2, updates=10**6, draw=lambda round: 0.5)


def pushed(hub, worker, delta, unsent=None):
    """The update of a worker in its round, after which the hub has dispatched it again; and its error buffer."""
    round_ = hub.scheduler.workers[worker].dispatch.round
    sent = encode_update(hub.algorithm.plan, delta, unsent, round_)
    outcomes = hub.push(Push(worker, round_, sent.delta), 1.0, None)
    return sent, outcomes


def test_fp32_is_no_codec():
    delta = grid(0)
    sent = encode_update(AsyncLocalSGD(inner_steps=1, codec="fp32").plan, delta, None, 0)
    assert sent.delta is delta
    assert (sent.data, sent.unsent, sent.nbytes) == (None, None, delta.nbytes)
    hub = hub_of("fp32")
    hub.join_all({0: None}, 0.0)
    pushed(hub, 0, grid(1))
    assert hub.task(hub.scheduler.workers[0].dispatch).params is hub.params, "workers share the hub's weights"
    assert not hub.encoded


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_the_sum_of_what_was_sent_and_what_is_owed_is_exact(codec):
    plan, wanted, arrived, error = AsyncLocalSGD(inner_steps=1, codec=codec).plan, grid(0).zeros(), grid(0).zeros(), None
    for round_ in range(10):
        wanted = wanted + grid(round_)
        sent = encode_update(plan, grid(round_), error, round_)
        arrived, error = arrived + sent.delta, sent.unsent
    assert error.norm() > 0
    assert (arrived + error).same_bits(wanted)


@pytest.mark.parametrize("codec", NAMES)
def test_a_worker_decodes_the_bits_that_the_hub_tracks_and_comes_closer_in_every_round(codec):
    hub = hub_of(codec)
    [dispatch] = hub.join_all({0: None}, 0.0)
    assert hub.task(dispatch).params is hub.params, "a new worker gets the weights themselves"
    held = hub.params.copy()
    assert hub.task_bytes(0) == 4 * NUMEL
    error, errors = None, []
    for round_ in range(30):
        sent, outcomes = pushed(hub, 0, grid(round_) if round_ == 0 else grid(0).zeros(), error)
        error = sent.unsent
        assert sent.nbytes == hub.update_bytes() == hub.task_bytes(0) == CODECS[codec].nbytes(NUMEL)
        held = decode_weights(CODECS[codec], held, hub.encoded[0])
        assert held.same_bits(hub.task(outcomes[-1]).params)
        errors.append((held - hub.params).norm())
    assert errors[-1] < (0.6 if codec == "topk" else 0.01) * grid(0).norm()


@pytest.mark.parametrize("what", ["leaves", "restarts"])
def test_a_worker_that_is_new_gets_whole_weights_and_a_restarted_hub_knows_what_workers_have(what):
    hub = hub_of("int4", grace_s=math.inf)
    hub.join_all({0: None, 1: None}, 0.0)
    for worker in (0, 1):
        pushed(hub, worker, grid(worker))
    assert sorted(hub.encoded) == [0, 1]
    if what == "leaves":
        hub.leave(0, 2.0)
        hub.join_all({0: None}, 3.0)
        assert hub.task(hub.scheduler.workers[0].dispatch).params is hub.params
        assert (hub.task_bytes(0), hub.task_bytes(1)) == (4 * NUMEL, CODECS["int4"].nbytes(NUMEL))
        return
    parts, other = copy.deepcopy(hub.to_parts()), hub_of("int4", grace_s=math.inf)
    other.from_parts(parts["state"], parts["versions"], parts["encoded"], parts["plain"])
    for worker in (0, 1):
        pushed(other, worker, grid(3))
        pushed(hub, worker, grid(3))
    assert all(torch.equal(hub.encoded[worker], other.encoded[worker]) for worker in (0, 1))
    assert other.params.same_bits(hub.params)


def test_an_update_that_is_not_finite_travels_as_it_is_and_leaves_no_debt():
    hub = hub_of("int8")
    hub.join_all({0: None}, 0.0)
    broken = Tree.of({"w": torch.full((NUMEL,), math.nan)})
    sent, outcomes = pushed(hub, 0, broken, grid(0))
    assert (sent.data, sent.unsent, sent.nbytes) == (None, None, 4 * NUMEL)
    assert isinstance(outcomes[0], Refusal)
    assert "not finite" in outcomes[0].reason


def test_without_feedback_nothing_is_kept_and_with_half_of_it_half_is_sent_later():
    plan = AsyncLocalSGD(inner_steps=1, codec="int2", feedback=0.0).plan
    assert encode_update(plan, grid(0), None, 0).unsent is None
    half = encode_update(replace(plan, feedback=0.5), grid(0), grid(1), 0)
    full = encode_update(replace(plan, feedback=1.0), grid(0), grid(1) * 0.5, 0)
    assert half.delta.same_bits(full.delta)


def test_half_precision_weights_and_other_bytes():
    codec, held = CODECS["int8"], grid(0).copy(torch.bfloat16)
    data = encode_weights(codec, grid(1).copy(torch.bfloat16), held, 0)
    assert decode_weights(codec, held, data).flat.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="encode no 1000 values"):
        decode_update(codec, data[:-1], held.layout, torch.float32)
    with pytest.raises(ConfigError, match=r"feedback=1\.5"):
        AsyncLocalSGD(inner_steps=1, feedback=1.5)
