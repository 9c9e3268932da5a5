"""ACCO: the paper's two equations, at any number of islands, and no trace of an estimate in the State."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from atoll.algorithms.acco import ACCO
from atoll.algorithms.ddp import DDP
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import ConfigError
from atoll.core.events import Evaluated, Exchanged
from atoll.core.flat_tree import Tree, trainable
from atoll.engines.shared_and_sharded_state import donated
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine, at
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster
from atoll.testing.conformance import digests
from atoll.testing.fakes import FakeReplica, ScriptedPeers, drive
from atoll.testing.simulated_runs import Regression, RegressionBatches, simulate

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
    """The sum over all islands of the gradients of their micro-batches of this number, at flat weights."""
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


# -------------------------------------------------------------------------------------------------------------- estimate and commit


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


@pytest.mark.parametrize("prepare", [lambda state: state, donated], ids=["kept", "donated"])
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
    norm_s = 0.0 if clip_norm is None else 8 * 4 * 0.03  # around the ring and back, to sum the squared norms
    assert one.finished.virtual_time_s == pytest.approx(two.finished.virtual_time_s + norm_s, rel=1e-4)
    assert not any(event.background for event in one.of(Exchanged))


def test_a_single_island_works_and_sends_nothing():
    done = simulate(ACCO(optimizer=AdamW(lr=0.05), clip_norm=1.0), steps=10, cluster=Cluster(islands=1))
    assert done.finished.sent_bytes_per_island == done.finished.control_bytes_per_island == 0
    assert done.finished.virtual_time_s == 10.5
    assert done.finished.val_loss < done.of(Evaluated)[0].loss


# -------------------------------------------------------------------------------------------------------------------- learning rate


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


# -------------------------------------------------------------------------------------------------------------------- other weights


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

    def __repr__(self):
        return "NoRate()"

    def init(self, params):
        return None

    def update(self, params, gradient, state, /):
        return params - gradient, None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"pieces_per_half": 0}, r"pieces_per_half=0.*at least 1 micro-batch.*Use 1"),
        ({"warmup": -1}, r"warmup=-1.*0 updates or more.*Use 0"),
        ({"clock": "samples", "weigh": "tokens"}, r"clock=samples.*weigh=tokens.*Use clock=commits, or weigh=batches"),
        ({"clock": "samples", "optimizer": NoRate()}, r"clock=samples sets.*NoRate has none.*Use clock=commits, or a rule"),
        ({"batch": "free", "optimizer": NoRate()}, r"clock=samples, the default for free batches.*NoRate has none"),
        ({"batch": "loose"}, r"batch"),
        ({"wire": "fp8"}, r"wire"),
    ],
    ids=repr,
)
def test_nonsense_is_refused_with_what_to_do(settings, says):
    with pytest.raises(ConfigError, match=says):
        ACCO(**settings)
