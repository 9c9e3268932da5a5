"""Every rule and every algorithm passes the same checks. A new one is one more row."""

import pytest

from atoll.algorithms.acco import ACCO
from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.algorithms.ddp import DDP
from atoll.algorithms.delayed_update import DPU
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.eager_updates import Eager
from atoll.algorithms.streaming import Streaming
from atoll.algorithms.weight_prediction import WP
from atoll.algorithms.zero import FSDP, ZeRO1
from atoll.optim.adam import Adam, AdamW
from atoll.optim.delayed_nesterov import Buffered, DelayedNesterov
from atoll.optim.schedules import WSD, Cosine
from atoll.optim.sgd import SGD, Momentum, Nesterov
from atoll.optim.staleness import DelayCompensation, Polynomial
from atoll.testing.conformance import ALGORITHM_CHECKS, ASYNC_CHECKS, check_rule

RULES = [
    SGD(lr=0.1),
    SGD(lr=Cosine(lr=0.1, steps=30, warmup=5), weight_decay=0.01),
    Momentum(lr=0.05, momentum=0.9),
    Nesterov(lr=0.1, momentum=0.9),
    Nesterov(lr=0.05, momentum=0.0),
    Adam(lr=0.02),
    Adam(lr=0.3, betas=(0.9, 0.95), eps=0.1),
    AdamW(lr=0.02),
    AdamW(lr=WSD(lr=0.02, steps=30, warmup=3, decay=10), weight_decay=0.5, decay="all"),
    DelayedNesterov(lr=0.1, period=1),
    DelayedNesterov(lr=0.1, period=4),
    DelayedNesterov(lr=Cosine(lr=0.1, steps=8), period=3, activation=0.3),
    Buffered(rule=Nesterov(lr=0.1), size=1),
    Buffered(rule=AdamW(lr=0.02), size=1),
]

ALGORITHMS = [
    DDP(optimizer=AdamW(lr=0.1)),
    DDP(optimizer=SGD(lr=0.05), accumulation=3, clip_norm=1.0),
    DDP(optimizer=AdamW(lr=0.1), buckets=8),
    ZeRO1(optimizer=AdamW(lr=0.1)),
    ZeRO1(optimizer=SGD(lr=0.05), accumulation=3, clip_norm=1.0),
    ZeRO1(optimizer=AdamW(lr=0.1), wire="bf16", weigh="tokens"),
    ZeRO1(optimizer=AdamW(lr=0.1), weigh="tokens", buckets=4),
    FSDP(optimizer=AdamW(lr=0.1), accumulation=2),
    ACCO(optimizer=AdamW(lr=0.1)),
    ACCO(optimizer=SGD(lr=0.05), pieces_per_half=2, clip_norm=1.0, warmup=2),
    ACCO(optimizer=AdamW(lr=0.1), batch="free", clock="samples"),
    ACCO(optimizer=AdamW(lr=0.1), batch="free", wire="bf16", sums="fp32", weigh="tokens"),
    DPU(optimizer=AdamW(lr=0.1), warmup=2),
    DPU(optimizer=SGD(lr=0.02), accumulation=2, clip_norm=1.0, warmup=0),
    WP(optimizer=AdamW(lr=0.1)),
    WP(optimizer=SGD(lr=0.02), wire="bf16", clip_norm=1.0, warmup=2),
    WP(optimizer=AdamW(lr=0.1), batch="free", accumulation=2),
    DPU(optimizer=AdamW(lr=0.1), batch="free", warmup=1),
    DiLoCo(inner_steps=1),
    DiLoCo(inner_steps=3),
    DiLoCo(inner_steps=3, outer=SGD(lr=1.0), weighting="examples"),
    DiLoCo(inner_steps=2, outer=Adam(lr=0.1, eps=0.1)),
    DiLoCo(inner_steps=2, outer=Momentum(lr=0.3, momentum=0.9), missed="agreed"),
    DiLoCo(inner_steps=2, pruned=0.25),
    DiLoCo(inner_steps=2, merge="disjoint", weighting="examples"),
    DiLoCo(inner_steps=2, moments="averaged"),
    DiLoCo(inner_steps=2, moments="averaged", moment_rounds=(2, 3), weighting="tokens"),
    DiLoCo(inner_steps=2, quorum=2, grace_s=0.5),
    DiLoCo(inner_steps=2, quorum=1, late="dropped", moments="averaged"),
    DiLoCo(inner_steps=2, quorum=2, missed="agreed", codec="int8"),
    DiLoCo(inner_steps=2, quorum=1, late="dropped", codec="int4"),
    DiLoCo(inner_steps=2, codec="bf16"),
    DiLoCo(inner_steps=2, codec="fp4"),
    DiLoCo(inner_steps=2, codec="int4"),
    DiLoCo(inner_steps=2, codec="int8"),
    DiLoCo(inner_steps=2, codec="int2", weighting="examples"),
    DiLoCo(inner_steps=2, codec="topk", feedback=0.95, outer=SGD(lr=1.0)),
    Eager(inner_steps=2),
    Streaming(inner_steps=4, fragments=2, overlap=0),
    Streaming(inner_steps=4, fragments=2, overlap=1, mixing=0.5),
    Streaming(inner_steps=4, fragments=3, overlap=3, codec="bf16-stochastic"),
    Streaming(inner_steps=4, fragments=2, overlap=1, split="balanced", codec="int4"),
]

ASYNC_ALGORITHMS = [
    AsyncLocalSGD(inner_steps=2),
    AsyncLocalSGD(inner_steps=4, pace="given", grace_s=0.5),
    AsyncLocalSGD(inner_steps=4, pace="measured"),
    AsyncLocalSGD(inner_steps=2, outer=Nesterov(lr=0.3), weight="1/k"),
    AsyncLocalSGD(inner_steps=2, outer=Buffered(rule=Nesterov(lr=0.7), size=4), grace_s=2.0),
    AsyncLocalSGD(inner_steps=2, outer=Momentum(lr=0.1), weight="sqrt(k)/k", shards="visits", ties="chance"),
    AsyncLocalSGD(inner_steps=3, outer=Adam(lr=0.05, eps=0.1)),
    AsyncLocalSGD(inner_steps=2, outer=SGD(lr=0.7), correction=Polynomial(threshold=6)),
    AsyncLocalSGD(inner_steps=2, codec="int4"),
    AsyncLocalSGD(inner_steps=4, codec="bf16-stochastic", feedback=0.5, grace_s=0.5),
    AsyncLocalSGD(inner_steps=2, outer=SGD(lr=0.5), correction=DelayCompensation(strength=0.5)),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rule_conforms(rule):
    check_rule(rule)


@pytest.mark.parametrize("check", ALGORITHM_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_algorithm_conforms(algorithm, check):
    check(algorithm)


@pytest.mark.parametrize("check", ASYNC_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("algorithm", ASYNC_ALGORITHMS, ids=repr)
def test_asynchronous_algorithm_conforms(algorithm, check):
    check(algorithm)
