"""ACCO: the paper's two equations, whatever the number of islands; every micro-batch counted once; nothing left of an estimate."""

import copy
import itertools
import math
import shutil
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn

from atoll import recipes
from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.zero1 import ZeRO1
from atoll.engines.sim.network import Link
from atoll.engines.sim.peers import RoundVoid
from atoll.engines.sim.world import Away, Cluster, Lost
from atoll.engines.states import given
from atoll.errors import ConfigError
from atoll.events import Computed, Evaluated, Exchanged, Recut, RoundFailed, RoundFinished, UpdateSkipped
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine, at
from atoll.optim.sgd import SGD
from atoll.runs import execute
from atoll.runs.run import candidates
from atoll.runs.settings import override
from atoll.testing.conformance import detached, digests
from atoll.testing.fakes import FakeReplica, ScriptedPeers, drive
from atoll.testing.simulate import Recorder, simulate, simulator
from atoll.testing.small import SMALL
from atoll.testing.workloads import Regression, RegressionBatches
from atoll.tree import Tree, trainable

COSINE = Cosine(lr=0.05, steps=8, warmup=2, floor=0.001)


# ------------------------------------------------------------------------------------------------------ the paper, in one tensor


class Textbook:
    """SGD or AdamW on one flat tensor, from the equations; `matrices` marks what decays."""

    def __init__(self, rule, matrices):
        self.rule, self.matrices = rule, matrices

    def __call__(self, theta, gradient, state):
        t, mean, square = state
        lr = at(self.rule.lr, t)
        if isinstance(self.rule, SGD):
            return theta - lr * gradient, (t + 1, mean, square)
        b1, b2 = self.rule.betas
        mean, square = b1 * mean + (1 - b1) * gradient, b2 * square + (1 - b2) * gradient**2
        step = mean / (1 - b1 ** (t + 1)) / ((square / (1 - b2 ** (t + 1))).sqrt() + self.rule.eps)
        return theta * (1 - lr * self.rule.weight_decay * self.matrices) - lr * step, (t + 1, mean, square)


def slopes(workload, theta, layout, islands, number, pieces):
    """Gradients of everybody's micro-batch of this number, added up, at flat weights."""
    module = workload.module().double()
    for name, weights in layout.views(theta).items():
        trainable(module)[name].data.copy_(weights)
    for island in range(islands):
        batch = workload.batches.batch(island % workload.batches.num_shards, number // pieces)
        piece = tuple(torch.tensor_split(part, pieces)[number % pieces].double() for part in batch)
        (module(piece[0]).squeeze(-1) - piece[1]).square().mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in trainable(module).values()])


def clipped(gradient, norm):
    return gradient * min(1.0, norm / float(gradient.norm())) if norm else gradient


def paper(workload, rule, islands, commits, accumulation=1, clip_norm=None):
    """Both equations, in double precision, unsharded."""
    start = Tree.of(workload.module())
    theta, pieces, many = start.flat.double(), 2 * accumulation, islands * accumulation
    opt = Textbook(rule, torch.cat([torch.full((p.numel(),), float(p.dim() >= 2)) for p in trainable(workload.module()).values()]))

    def half(at_weights, number):
        numbers = range(number * accumulation, (number + 1) * accumulation)
        return sum(slopes(workload, at_weights, start.layout, islands, n, pieces) for n in numbers)

    state, first = (0, torch.zeros_like(theta), torch.zeros_like(theta)), half(theta, 0)
    for t in range(commits):
        estimate, _ = opt(theta, clipped(first / many, clip_norm), state)
        both = first + half(theta, 2 * t + 1)
        first = half(estimate, 2 * t + 2)
        theta, state = opt(theta, clipped(both / (2 * many), clip_norm), state)
    return theta


class Tied(nn.Module):
    """Tied weights, a frozen layer, a norm and a bias, which do not decay; 46 weights are trained."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen, self.norm = nn.Linear(5, 5), nn.Linear(5, 5), nn.LayerNorm(5)
        self.again, self.last = nn.Linear(5, 5, bias=False), nn.Linear(5, 1)
        self.again.weight = self.first.weight
        self.frozen.requires_grad_(False)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) / (number + 2))

    def forward(self, x):
        return self.last(self.again(torch.tanh(self.norm(self.frozen(self.first(x))))))


class TiedRegression(Regression):
    def module(self):
        return Tied()


RULES = [SGD(lr=COSINE), AdamW(lr=0.05, weight_decay=0.5), AdamW(lr=COSINE, betas=(0.5, 0.9), weight_decay=0.0)]


@pytest.mark.parametrize("rule", RULES, ids=["sgd", "adamw", "adamw-cosine"])
@pytest.mark.parametrize(("islands", "accumulation"), [(1, 1), (2, 2), (3, 1), (4, 1), (7, 1)])
def test_it_is_the_papers_two_equations_sharded_or_not(rule, islands, accumulation):
    """22 weights, so slices of unequal length; bias correction included, since the first commits are compared."""
    workload = Regression(RegressionBatches(num_shards=islands), hidden=3)
    algorithm = ACCO(optimizer=rule, pieces_per_half=accumulation)
    done = simulate(algorithm, workload=workload, steps=5, cluster=Cluster(islands=islands))
    expected = paper(workload, rule, islands, 5, accumulation)
    assert float((done.params.flat - expected).abs().max()) < 2e-5


def test_more_islands_than_weights_hold_slices_of_nothing_and_change_nothing():
    workload = Regression(RegressionBatches(num_shards=6, dimensions=3))
    done = simulate(ACCO(optimizer=AdamW(lr=0.05)), workload=workload, steps=4, cluster=Cluster(islands=6))
    assert sorted(island.state.params.numel for island in done.engine.islands.values()) == [0, 0, 1, 1, 1, 1]
    assert float((done.params.flat - paper(workload, AdamW(lr=0.05), 6, 4)).abs().max()) < 2e-5


@pytest.mark.parametrize("clip_norm", [0.05, 0.5])
def test_estimate_and_commit_are_clipped_by_the_norm_of_the_whole(clip_norm):
    """With SGD the length of a gradient matters, so a norm of a slice, or an estimate that is not clipped, would show."""
    workload, rule = Regression(hidden=3), SGD(lr=0.3)
    done = simulate(ACCO(optimizer=rule, clip_norm=clip_norm), workload=workload, steps=6, cluster=Cluster(islands=3))
    assert float((done.params.flat - paper(workload, rule, 3, 6, clip_norm=clip_norm)).abs().max()) < 1e-5
    assert float((done.params.flat - paper(workload, rule, 3, 6)).abs().max()) > 1e-3


@pytest.mark.parametrize("islands", [1, 3, 5])
def test_tied_frozen_and_spared_weights_are_those_of_the_whole_model(islands):
    workload, rule = TiedRegression(RegressionBatches(num_shards=islands)), AdamW(lr=0.02, weight_decay=2.0, eps=0.01)
    done = simulate(ACCO(optimizer=rule), workload=workload, steps=5, cluster=Cluster(islands=islands))
    assert "frozen.weight" not in done.params
    assert "again.weight" not in done.params
    assert done.params.numel == 46
    assert float((done.params.flat - paper(workload, rule, islands, 5)).abs().max()) < 2e-5


# ---------------------------------------------------------------------------------------------------------- gradient descent


class Doubled(RegressionBatches):
    """All examples of one shard, twice over: both halves of every batch are the same, whoever reads it."""

    def batch(self, shard, position):
        inputs, targets = super().batch(0, 0)
        return torch.cat([inputs, inputs]), torch.cat([targets, targets])


DOUBLED = Regression(Doubled(full_batch=True))


def descent(steps, lr=0.05):
    """Plain torch on the full batch."""
    module = DOUBLED.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        DOUBLED.loss(module, DOUBLED.batches.batch(0, 0)).backward()
        optimizer.step()
    return Tree.of(module)


@pytest.mark.parametrize("islands", [1, 2, 4])
@pytest.mark.parametrize("batch", ["fixed", "free"])
def test_full_batch_gradient_descent_through_it_is_gradient_descent(islands, batch):
    """Every gradient is the full one, so the estimate is the commit, and both are a plain step."""
    cluster = Cluster(islands=islands, step_time_s=(1.0, 0.3))
    done = simulate(ACCO(optimizer=SGD(lr=0.05), batch=batch, clock="commits"), workload=DOUBLED, steps=20, cluster=cluster)
    assert float((done.params.flat - descent(20).flat).abs().max()) < 1e-6


class Watched(FakeReplica):
    """Remembers every load, and the bits of a State when it is first asked for a gradient."""

    def __init__(self, state=None):
        super().__init__(moves_by=-0.5)
        self.loaded, self.bits, self.state = [], None, state

    def load(self, params):
        super().load(params)
        self.loaded.append(params.copy())

    async def gradient(self, work, **options):
        if self.state is not None and self.bits is None:
            self.bits = digests((self.state.params, self.state.optimizer))
        return await super().gradient(work, **options)


@pytest.mark.parametrize("clock", ["commits", "samples"])
@pytest.mark.parametrize("rule", [AdamW(lr=COSINE), SGD(lr=COSINE)], ids=["adamw", "sgd"])
def test_from_equal_gradients_estimate_and_commit_are_the_same_bits(rule, clock):
    """The same weights, the same optimizer state and the same learning rate; a state that leaked would show from round 0 on."""
    algorithm, peers, replica = ACCO(optimizer=rule, clock=clock), ScriptedPeers(), Watched()
    params = Tree.of({"w": torch.linspace(-1, 1, 6).view(2, 3)})
    state, whole, moments = algorithm.init(params, peers), params, rule.init(params)
    replica.load(params)
    for commit in range(8):
        state = drive(algorithm.round(state, replica, peers))
        whole, moments = rule.update(whole, params.zeros() + 0.5, moments)
        estimate, committed = replica.loaded[-2:]
        assert estimate.equal(committed), f"commit {commit}"
        assert committed.equal(whole)
    assert len(replica.loaded) == 1 + 2 * 8


@pytest.mark.parametrize("prepare", [lambda state: state, given], ids=["kept", "given"])
def test_an_estimate_leaves_weights_and_optimizer_state_bit_identical(prepare):
    """Also where a round may compute in the State's own buffers, as the commit then does."""
    algorithm, peers = ACCO(optimizer=AdamW(lr=0.1)), ScriptedPeers()
    params = Tree.of({"w": torch.linspace(-1, 1, 6)})
    first = Watched()
    first.load(params)
    state = drive(algorithm.round(algorithm.init(params, peers), first, peers))
    before = digests((state.params, state.optimizer))
    state = prepare(state)
    replica = Watched(state)
    replica.load(first.params())
    new = drive(algorithm.round(state, replica, peers))
    assert not replica.loaded[1].equal(first.params()), "there was an estimate"
    assert replica.bits == before, "the second half is computed when the estimate is there"
    assert digests((new.params, new.optimizer)) != before
    assert (state.optimizer.step, new.optimizer.step) == (1, 2)


# ------------------------------------------------------------------------------------------------ simpler things that it must be


@pytest.mark.parametrize(("islands", "clip_norm"), [(1, None), (3, None), (3, 0.3)])
def test_while_it_warms_up_it_is_zero1_on_the_same_pieces_to_the_bit(islands, clip_norm):
    options = {"steps": 6, "cluster": Cluster(islands=islands)}
    algorithm = ACCO(optimizer=AdamW(lr=0.05), pieces_per_half=2, warmup=6, clip_norm=clip_norm)
    one = simulate(algorithm, workload=Regression(RegressionBatches(batch_size=8), hidden=3), **options)
    pieces = Regression(RegressionBatches(batch_size=2), hidden=3)
    two = simulate(ZeRO1(optimizer=AdamW(lr=0.05), accumulation=4, clip_norm=clip_norm), workload=pieces, **options)
    assert one.params.equal(two.params)
    assert one.finished.tokens == two.finished.tokens


@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_while_it_warms_up_it_is_data_parallel_training_within_rounding(clip_norm):
    options = {"steps": 8, "cluster": Cluster(islands=3), "workload": Regression(hidden=3)}
    one = simulate(ACCO(optimizer=AdamW(lr=0.05), warmup=8, clip_norm=clip_norm), **options)
    two = simulate(DDP(optimizer=AdamW(lr=0.05), clip_norm=clip_norm), **options)
    assert torch.allclose(one.params.flat, two.params.flat, rtol=1e-5, atol=1e-6)
    norm_s = 0.0 if clip_norm is None else 8 * 4 * 0.03  # around the ring and back, to tell each other the norm
    assert one.finished.virtual_time_s == pytest.approx(two.finished.virtual_time_s + norm_s, rel=1e-4)
    assert not any(event.background for event in one.of(Exchanged))


def test_a_single_island_works_and_sends_nothing():
    done = simulate(ACCO(optimizer=AdamW(lr=0.05), clip_norm=1.0), steps=10, cluster=Cluster(islands=1))
    assert done.finished.sent_bytes_per_island == done.finished.control_bytes_per_island == 0
    assert done.finished.virtual_time_s == 10.5
    assert done.finished.val_loss < done.of(Evaluated)[0].loss


# --------------------------------------------------------------------------------------------- every micro-batch counted once


def states_of(engine):
    return [island.state for island in engine.islands.values()]


def accounted(engine):
    """Weight of all gradients, wherever they went: commits, halves that wait, and what was dropped."""
    states = states_of(engine)
    assert len({(state.steps, state.committed) for state in states}) == 1, "all islands count the same commits"
    return states[0].committed + sum((state.first.weight if state.first else 0.0) + state.dropped for state in states)


@dataclass(frozen=True)
class Poisoned(RegressionBatches):
    """NaN in the halves of batches that `where` lists, as (shard, number of the half)."""

    where: tuple[tuple[int, int], ...] = ()

    def batch(self, shard, position):
        inputs, targets = super().batch(shard, position)
        targets = targets.clone()
        for number, half in enumerate(torch.tensor_split(targets, 2)):
            if (shard, 2 * position + number) in self.where:
                half.fill_(math.nan)
        return inputs, targets


def poisoned(*where):
    return Regression(Poisoned(where=where))


COUNTED = [
    ACCO(optimizer=SGD(lr=0.02)),
    ACCO(optimizer=SGD(lr=0.02), pieces_per_half=2, warmup=3),
    ACCO(optimizer=SGD(lr=0.02), batch="free", pieces_per_half=2),
    ACCO(optimizer=SGD(lr=0.02), batch="free", clock="samples", warmup=2),
    ACCO(optimizer=SGD(lr=0.02), batch="free", weigh="tokens"),
]


@pytest.mark.parametrize("workload", [Regression(), poisoned((1, 8), (2, 13))], ids=["clean", "poisoned"])
@pytest.mark.parametrize("algorithm", COUNTED, ids=["fixed", "warm-up", "free", "samples", "tokens"])
def test_commits_waiting_halves_and_what_was_dropped_are_all_that_was_computed(algorithm, workload):
    cluster = Cluster(islands=3, step_time_s=(0.5, 1.0, 2.0), link=Link(latency_s=0.3))
    done = simulate(algorithm, steps=12, workload=workload, cluster=cluster, evaluate_every=100)
    pieces = algorithm.pieces
    computed = sum(event.tokens if algorithm.weigh == "tokens" else event.batches * pieces for event in done.of(Computed))
    assert accounted(done.engine) == pytest.approx(computed, abs=1e-9)
    assert (sum(state.dropped for state in states_of(done.engine)) > 0) == (workload != Regression())
    waiting = sum(state.first.tokens for state in states_of(done.engine))
    lost = sum(state.dropped for state in states_of(done.engine)) * (1 if algorithm.weigh == "tokens" else 8 / pieces)
    assert done.finished.tokens == sum(event.tokens for event in done.of(Computed)) - waiting - lost


def test_a_resumed_run_goes_on_counting_where_it_was():
    algorithm, saved = ACCO(optimizer=SGD(lr=0.02), batch="free"), []
    options = {"steps": 10, "cluster": Cluster(islands=3, step_time_s=(0.5, 1.0, 2.0)), "workload": poisoned((1, 4), (0, 21))}
    engine, sink = simulator(algorithm, save=lambda e: saved.append(copy.deepcopy(detached(e.parts()))), **options)
    engine.run()
    for parts in saved[2:8:2]:
        again, _ = simulator(algorithm, **options)
        again.restore(lambda part, like, parts=parts: copy.deepcopy(parts[part]))
        again.run()
        assert accounted(again) == accounted(engine) == sum(e.batches * 2 for e in sink.events if isinstance(e, Computed))
        assert [digests(tuple(vars(state).values())) for state in states_of(again)] == [
            digests(tuple(vars(state).values())) for state in states_of(engine)
        ]


# --------------------------------------------------------------------------------------------------------------- virtual time


def times_per_update(algorithm, m, step_time_s=(1.0,), islands=2, steps=6):
    """Seconds between one round's end and the next, and when the first ended. `m` is a reduce-scatter and an all-gather."""
    link = Link(latency_s=m / (2 * (islands - 1)), bandwidth_mbit_per_s=math.inf)
    cluster = Cluster(islands=islands, step_time_s=step_time_s, link=link)
    done = simulate(algorithm, steps=steps, cluster=cluster, evaluate_every=100)
    ends = [event.virtual_time_s for event in done.of(RoundFinished)]
    return [later - earlier for earlier, later in itertools.pairwise(ends)], ends[0]


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize(("step_time_s", "islands"), [((1.0,), 2), ((1.0,), 5), ((0.25, 1.0, 0.5), 3)])
def test_an_update_takes_the_longer_of_computing_and_two_exchanges(ratio, step_time_s, islands):
    """c = 1 s, of the slowest; m = ratio / 2. Once the first half-batch is there, max(c, 2m); ZeRO-1 and DDP take c + m."""
    m = ratio / 2
    each, first = times_per_update(ACCO(optimizer=SGD(lr=0.02)), m, step_time_s, islands)
    assert each == pytest.approx([max(1.0, 2 * m)] * 5)
    assert first == pytest.approx(0.5 + max(1.0, 2 * m))
    for other in (ZeRO1(optimizer=SGD(lr=0.02)), DDP(optimizer=SGD(lr=0.02))):
        each, first = times_per_update(other, m, step_time_s, islands)
        assert [first, *each] == pytest.approx([1.0 + m] * 6)


@pytest.mark.parametrize("islands", [2, 3, 4])
def test_each_commit_sends_exactly_twice_zero1s_bytes(islands):
    options = {"cluster": Cluster(islands=islands), "workload": Regression(hidden=3)}

    def per_update(algorithm):
        done = simulate(algorithm, steps=4, **options)
        return [[sum(e.sent_bytes[i] for e in done.of(Exchanged) if e.round == r) for i in range(islands)] for r in range(4)]

    acco, zero1 = per_update(ACCO(optimizer=AdamW(lr=0.1))), per_update(ZeRO1(optimizer=AdamW(lr=0.1)))
    assert acco == [[2 * sent for sent in round] for round in zero1]


def test_in_the_free_mode_nobody_is_ever_idle_and_a_faster_island_contributes_in_proportion():
    cluster = Cluster(islands=4, step_time_s=(1.0, 1.0, 1.0, 0.25), link=Link(latency_s=0.2))
    done = simulate(ACCO(optimizer=SGD(lr=0.01), batch="free"), steps=20, cluster=cluster, evaluate_every=100)
    for ledger in done.engine.books.ledgers:
        assert ledger.computed_s == pytest.approx(ledger.present_s)
    counts = [sum(event.batches for event in done.of(Computed) if event.island == island) for island in range(4)]
    assert counts[3] / counts[0] == pytest.approx(4.0, rel=0.05)
    fixed = simulate(ACCO(optimizer=SGD(lr=0.01)), steps=8, cluster=cluster, evaluate_every=100)
    assert fixed.engine.books.ledgers[3].computed_s < 0.3 * fixed.engine.books.ledgers[3].present_s


@pytest.mark.parametrize(("latency_s", "halves"), [(0.25, 1), (0.25 + 2.0**-30, 2), (0.25 - 2.0**-30, 1), (0.5, 2)])
def test_an_exchange_that_ends_at_the_moment_a_micro_batch_ends_is_over(latency_s, halves):
    """Half a batch takes 0.5 s and an exchange twice the latency: all numbers are exact in binary."""
    cluster = Cluster(islands=2, link=Link(latency_s=latency_s, bandwidth_mbit_per_s=math.inf))
    done = simulate(ACCO(optimizer=SGD(lr=0.01), batch="free", clock="commits"), steps=5, cluster=cluster)
    assert sum(2 * event.batches for event in done.of(Computed)) == 2 * (1 + 2 * 5 * halves)


# -------------------------------------------------------------------------------------------------------------- learning rate


@pytest.mark.parametrize(("steps", "position"), [(0.0, 0), (0.99, 0), (3.0, 3), (3.7, 3), (6.25, 6)])
def test_by_samples_the_rate_stands_at_the_nominal_batches_that_were_committed(steps, position):
    algorithm, peers = ACCO(optimizer=SGD(lr=COSINE), clock="samples"), ScriptedPeers()
    params, replica = Tree.of({"w": torch.zeros(3)}), Watched()
    replica.load(params)
    state = drive(algorithm.round(replace(algorithm.init(params, peers), steps=steps), replica, peers))
    moved = torch.zeros(3) - COSINE(position) * 0.5
    assert [torch.equal(loaded["w"], moved) for loaded in replica.loaded[1:]] == [True, True], "the estimate too"
    assert state.steps == steps + 1.0
    assert state.committed == 2.0


def test_by_samples_steps_are_committed_samples_over_the_nominal_batch_and_the_run_ends_by_them():
    cluster = Cluster(islands=3, step_time_s=(1.0, 0.5, 0.25), link=Link(latency_s=0.2))
    algorithm = ACCO(optimizer=SGD(lr=0.01), batch="free", clock="samples", pieces_per_half=2)
    done = simulate(algorithm, steps=30, cluster=cluster, evaluate_every=100)
    [(steps, committed)] = {(state.steps, state.committed) for state in states_of(done.engine)}
    assert steps == pytest.approx(committed / (3 * 4))
    ends = [event.steps for event in done.of(RoundFinished)]
    assert ends[-2] < 30 <= ends[-1] == int(steps)
    assert len(ends) < 25, "commits are larger than nominal, so that there are fewer"
    assert {state.optimizer.step for state in states_of(done.engine)} == {len(ends)}


@pytest.mark.parametrize(
    ("settings", "ticks"),
    [
        ({}, "commits"),
        ({"batch": "free"}, "samples"),
        ({"batch": "free", "weigh": "tokens"}, "commits"),
        ({"batch": "free", "clock": "commits"}, "commits"),
        ({"clock": "samples"}, "samples"),
    ],
    ids=repr,
)
def test_unless_told_otherwise_free_batches_go_by_samples_and_all_others_by_commits(settings, ticks):
    assert ACCO(**settings).ticks == ticks


def test_free_batches_alone_change_nothing_about_how_much_a_run_reads():
    """Up to one commit, which may be larger than a nominal batch."""
    cluster = Cluster(islands=3, step_time_s=(1.0, 0.5, 0.25), link=Link(latency_s=0.2))
    options = {"steps": 30, "cluster": cluster, "evaluate_every": 100}
    fixed, free = (simulate(ACCO(optimizer=SGD(lr=0.01), batch=batch), **options).finished for batch in ("fixed", "free"))
    assert fixed.tokens <= free.tokens <= fixed.tokens * (1 + 1 / free.rounds)
    assert free.rounds < fixed.rounds


def test_by_commits_the_rate_ticks_once_a_commit_and_not_for_skipped_ones():
    """Round 1's second half is poisoned on one island: of six rounds five moved the weights, at the first five rates."""
    rule = SGD(lr=Cosine(lr=0.1, steps=6))
    done = simulate(ACCO(optimizer=rule), steps=6, workload=poisoned((2, 3)), cluster=Cluster(islands=3))
    assert {(state.steps, state.optimizer.step) for state in states_of(done.engine)} == {(6.0, 5)}
    assert done.finished.rounds == 6
    assert done.finished.outer_steps == 5


# ----------------------------------------------------------------------------------------------------- what is not a number


@pytest.mark.parametrize(("half", "said"), [(2, 2), (3, 1)], ids=["first half", "second half"])
@pytest.mark.parametrize("options", [{}, {"wire": "bf16", "sums": "fp32"}, {"clip_norm": 0.3}], ids=repr)
def test_one_islands_nan_makes_all_skip_that_update_and_say_whose_it_was(half, said, options):
    """Half 2 is the first, half 3 the second of round 1. A first half spoils the estimate and the commit, a second the commit
    alone, after which replicas must be back at the weights before; the engine looks at that at the end of each round."""
    algorithm = ACCO(optimizer=AdamW(lr=0.05), **options)
    islands = Cluster(islands=3)
    clear = simulate(algorithm, steps=1, workload=poisoned(), cluster=islands)
    done = simulate(algorithm, steps=2, workload=poisoned((1, half)), cluster=islands)
    assert [(event.round, event.islands) for event in done.of(UpdateSkipped)] == [(1, [1])] * said
    assert done.params.equal(clear.params)
    assert [digests(state.optimizer) for state in states_of(done.engine)] == [
        digests(state.optimizer) for state in states_of(clear.engine)
    ]
    assert done.finished.tokens == clear.finished.tokens
    assert done.finished.outer_steps == 1
    held = Tree.join([algorithm.held(state) for state in states_of(done.engine)])
    assert all(island.replica.weights.holds(held) for island in done.engine.islands.values())


@pytest.mark.parametrize("half", [0, 1, 2, 3, 7])
def test_after_a_skipped_update_training_goes_on(half):
    done = simulate(ACCO(optimizer=SGD(lr=0.05)), steps=8, workload=poisoned((0, half)), cluster=Cluster(islands=2))
    assert len({event.round for event in done.of(UpdateSkipped)}) == 1
    assert done.finished.outer_steps == 7
    assert done.params.is_finite()


# --------------------------------------------------------------------------------------------------------- islands that are lost


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("batch", ["fixed", "free"])
def test_a_round_that_lacks_somebody_is_void_and_the_weights_and_the_waiting_half_before_it_stand(lost, batch):
    """Every batch is the same, so the run with one void round must have the bits of a run that is one round shorter."""
    algorithm = ACCO(optimizer=AdamW(lr=0.05), batch=batch)
    never = Cluster(islands=3, lost=(Lost(island=0, round=10**6),))
    lossy = Cluster(islands=3, lost=(Lost(island=1, round=lost),))
    clear = simulate(algorithm, steps=4, workload=DOUBLED, cluster=never)
    done = simulate(algorithm, steps=5, workload=DOUBLED, cluster=lossy)
    assert [(event.round, event.what, event.islands) for event in done.of(RoundFailed)] == [(lost, "reduce_scatter", [1])]
    assert done.params.equal(clear.params)
    assert accounted(done.engine) == accounted(clear.engine)
    assert done.finished.tokens == clear.finished.tokens
    assert done.finished.virtual_time_s > clear.finished.virtual_time_s


class Cut:
    """Peers whose line fails at the so-manieth reduce-scatter or all-gather of a round."""

    def __init__(self, peers, at):
        self._peers, self._left = peers, at

    def __getattr__(self, name):
        return getattr(self._peers, name)

    def _count(self, what):
        self._left -= 1
        if self._left == 0:
            raise RoundVoid(what, [1], 100.0)

    async def reduce_scatter(self, tree, weight=1.0, *, wide=False):
        self._count("reduce_scatter")
        return await self._peers.reduce_scatter(tree, weight, wide=wide)

    async def all_gather(self, shard):
        self._count("all_gather")
        return await self._peers.all_gather(shard)


@dataclass(frozen=True, kw_only=True)
class CutOff(ACCO):
    """ACCO that loses an island once, in the round after `commits` and at that exchange of it."""

    commits: int
    exchange: int
    strikes: list = field(default_factory=lambda: [1])

    async def round(self, state, replica, peers):
        strikes = state.steps == self.commits and len(self.strikes) > 0
        if strikes and peers.rank == 0:
            self.strikes.pop()
        return await super().round(state, replica, Cut(peers, self.exchange) if strikes else peers)


@pytest.mark.parametrize("exchange", [1, 2, 3, 4])
def test_an_island_lost_in_any_exchange_of_a_round_voids_it_whole(exchange):
    """The estimate's two exchanges and the commit's two: the weights, moments and waiting halves before them stand."""
    cluster = Cluster(islands=2, lost=(Lost(island=0, round=10**6),))
    clear = simulate(ACCO(optimizer=AdamW(lr=0.05)), steps=4, workload=DOUBLED, cluster=cluster)
    done = simulate(CutOff(optimizer=AdamW(lr=0.05), commits=2, exchange=exchange), steps=5, workload=DOUBLED, cluster=cluster)
    whats = ["reduce_scatter", "all_gather"]
    assert [(event.round, event.what) for event in done.of(RoundFailed)] == [(2, whats[(exchange - 1) % 2])]
    assert done.params.equal(clear.params)
    assert accounted(done.engine) == accounted(clear.engine)


@dataclass(frozen=True)
class Laborious(Regression):
    """Takes some milliseconds, and notes when it is through."""

    through: list = field(default_factory=list)

    def loss(self, module, batch):
        for _ in range(10):
            torch.ones(400, 400) @ torch.ones(400, 400)
        self.through.append(1)
        return super().loss(module, batch)

    def evaluate(self, module):
        return {"loss": 0.0}


class Noting(Recorder):
    """Remembers how much a laborious workload was through with at each event of these kinds."""

    def __init__(self, workload):
        super().__init__()
        self.workload, self.noted = workload, []

    def emit(self, event):
        super().emit(event)
        if isinstance(event, Evaluated | RoundFailed):
            self.noted.append(len(self.workload.through))


def test_a_void_round_leaves_nothing_behind_that_computes_on():
    """Both islands computed a first half. Then one of them had begun with the second when the other's line failed: a replica that
    is still busy cannot begin the next round."""
    sink, lossy = Noting(Laborious()), Cluster(islands=2, lost=(Lost(island=1, round=0),))
    simulate(ACCO(optimizer=SGD(lr=0.05)), steps=1, cluster=lossy, workload=sink.workload, sink=sink)
    start, failed, _ = sink.noted
    assert failed - start == 3


# ------------------------------------------------------------------------------------------------------ islands that come and go


def test_islands_that_come_and_go_change_nothing_where_all_read_the_same():
    """Slices are cut anew, moments go on: gradient descent still, whoever is there. What a leaver had waiting goes with it."""
    cluster = Cluster(islands=4, away=(Away(island=1, start=2, stop=5), Away(island=3, start=0, stop=3)))
    done = simulate(ACCO(optimizer=SGD(lr=0.05)), steps=8, workload=DOUBLED, cluster=cluster)
    assert float((done.params.flat - descent(8).flat).abs().max()) < 1e-6
    assert [(event.round, event.islands) for event in done.of(Recut)] == [(2, [0, 2]), (3, [0, 2, 3]), (5, [0, 1, 2, 3])]
    assert sum(2 * event.batches for event in done.of(Computed)) == accounted(done.engine) + 1


def test_a_newcomer_starts_without_a_waiting_half():
    """It computes three halves in its first round, the others two."""
    cluster = Cluster(islands=3, away=(Away(island=2, start=0, stop=2),))
    done = simulate(ACCO(optimizer=SGD(lr=0.05)), steps=4, cluster=cluster)
    halves = {
        (island, round): sum(2 * e.batches for e in done.of(Computed) if (e.island, e.round) == (island, round))
        for island in (0, 2)
        for round in (2, 3)
    }
    assert halves == {(0, 2): 2, (0, 3): 2, (2, 2): 3, (2, 3): 2}


def test_going_on_from_other_weights_drops_the_waiting_half_and_counts_it():
    algorithm, peers, replica = ACCO(optimizer=AdamW(lr=0.1)), ScriptedPeers(), Watched()
    params = Tree.of({"w": torch.ones(3)})
    replica.load(params)
    state = drive(algorithm.round(algorithm.init(params, peers), replica, peers))
    rebased = algorithm.rebase(state, params * 5, peers)
    assert rebased.params.equal(params * 5)
    assert (rebased.first, rebased.dropped) == (None, state.first.weight)
    assert digests(rebased.optimizer) == digests(state.optimizer)


# ------------------------------------------------------------------------------------------------------------------ bad input


class NoRate:
    """A rule without a learning rate."""

    def init(self, params):
        return None

    def update(self, params, gradient, state, /):
        return params - gradient, None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"pieces_per_half": 0}, r"pieces_per_half=0.*at least 1 micro-batch.*Use 1"),
        ({"warmup": -1}, r"warmup=-1.*0 commits or more.*Use 0"),
        ({"clock": "samples", "weigh": "tokens"}, r"clock=samples.*weigh=tokens.*Use clock=commits, or weigh=batches"),
        ({"clock": "samples", "optimizer": NoRate()}, r"clock=samples sets.*NoRate has none.*Use clock=commits, or a rule"),
        ({"batch": "free", "optimizer": NoRate()}, r"clock=samples, which free batches go by.*NoRate has none"),
        ({"batch": "loose"}, r"batch"),
        ({"wire": "fp8"}, r"wire"),
    ],
    ids=repr,
)
def test_nonsense_is_refused_with_what_to_do(settings, says):
    with pytest.raises(ConfigError, match=says):
        ACCO(**settings)


# -------------------------------------------------------------------------------------------------------------------- resume


def test_a_run_folder_is_resumed_with_its_waiting_halves_to_the_byte(tmp_path):
    settings = [*SMALL, "train.steps=6", "train.warm_start_steps=2", "keep.evaluate_every=2", "keep.save_every=2"]
    run = override(recipes.demo_ddp(), [*settings, "keep.checkpoints=9"], candidates)
    run = replace(run, algorithm=ACCO(batch="free", clock="samples", wire="bf16", sums="fp32"))
    whole = execute.run(run, out=tmp_path / "run")

    def left():
        return (whole.folder / "events.jsonl").read_bytes(), (whole.folder / "final.safetensors").read_bytes()

    before, saved = left(), sorted((whole.folder / "checkpoints").iterdir())
    assert len(saved) >= 2
    for checkpoint in saved[1:]:
        shutil.rmtree(checkpoint)
    (whole.folder / "final.safetensors").unlink()
    assert execute.resume(whole.folder).summary.resumed_from_round == int(saved[0].name)
    assert left() == before
