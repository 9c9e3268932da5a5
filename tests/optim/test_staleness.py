from functools import partial

import pytest
import torch

from atoll.core.chunked_elementwise import CHUNK
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.core.protocols import Arrival, Correction
from atoll.optim.staleness import DelayCompensation, Polynomial, check_weight, weight_of

torch.set_num_threads(1)


def drawn(seed: int, numel: int = 10) -> Tree:
    return Tree.of({"w": torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)})


def arrival(staleness: int, numel: int = 10) -> Arrival:
    return Arrival(delta=drawn(1, numel), dispatched=drawn(2, numel), staleness=staleness, workers=4)


@pytest.mark.parametrize(("staleness", "factor"), [(0, 1.0), (1, 2**-0.5), (3, 0.5), (99, 0.1)])
def test_a_late_delta_counts_by_the_root_of_its_lateness(staleness, factor):
    late = arrival(staleness)
    corrected = Polynomial().correct(drawn(3), late)
    torch.testing.assert_close(corrected.flat, factor * late.delta.flat)


@pytest.mark.parametrize("correction", [Polynomial(), Polynomial(power=0.0), DelayCompensation(strength=0.0)])
def test_what_needs_no_correction_keeps_its_bits(correction):
    late = arrival(0)
    assert correction.correct(drawn(3), late).same_bits(late.delta)


def test_beyond_the_threshold_an_update_is_left_out():
    correction = Polynomial(threshold=10)
    assert correction.correct(drawn(3), arrival(11)) is None
    assert correction.correct(drawn(3), arrival(10)).equal(Polynomial().correct(drawn(3), arrival(10)))


@pytest.mark.parametrize("numel", [1, 100, CHUNK + 3])
def test_compensation_is_the_formula_chunk_by_chunk(numel):
    late, params = arrival(2, numel), drawn(3, numel)
    delta, drift = late.delta.flat, params.flat - late.dispatched.flat
    corrected = DelayCompensation(strength=0.3).correct(params, late)
    torch.testing.assert_close(corrected.flat, delta + 0.3 * delta * delta * drift, rtol=1e-12, atol=1e-12)


def test_weights_that_have_not_moved_need_no_compensation():
    late = arrival(0)
    assert DelayCompensation(strength=5.0).correct(late.dispatched, late).same_bits(late.delta)


def test_compensation_follows_a_loss_whose_curvature_is_the_square_of_its_gradient():
    """At w the gradient of -log(1 - w) is 1 / (1 - w), and its derivative is the square of it: one step is right to first order."""
    then, now = 0.2, 0.2001
    late = Arrival(
        delta=Tree.of({"w": torch.tensor([1 / (1 - then)], dtype=torch.float64)}),
        dispatched=Tree.of({"w": torch.tensor([then], dtype=torch.float64)}),
        staleness=1,
        workers=2,
    )
    corrected = DelayCompensation(strength=1.0).correct(Tree.of({"w": torch.tensor([now], dtype=torch.float64)}), late)
    assert corrected["w"].item() == pytest.approx(1 / (1 - now), abs=1e-7)
    assert late.delta["w"].item() != pytest.approx(1 / (1 - now), abs=1e-5)


@pytest.mark.parametrize("correction", [Polynomial(), Polynomial(threshold=3), DelayCompensation(strength=0.5)], ids=repr)
def test_a_correction_changes_none_of_its_arguments(correction: Correction):
    for numel in (10, CHUNK + 3):
        late, params = arrival(3, numel), drawn(3, numel)
        before = [tree.digest() for tree in (params, late.delta, late.dispatched)]
        first, second = correction.correct(params, late), correction.correct(params, late)
        assert [tree.digest() for tree in (params, late.delta, late.dispatched)] == before
        assert first.same_bits(second)


def test_a_weight_is_a_number_or_follows_from_the_workers():
    assert [weight_of(0.125, workers) for workers in (1, 4)] == [0.125, 0.125]
    assert [weight_of("1/k", workers) for workers in (1, 4, 8)] == [1.0, 0.25, 0.125]
    assert [weight_of("sqrt(k)/k", workers) for workers in (1, 4, 16)] == [1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(Polynomial, power=-0.5), r"power=-0.5 must be .* at least 0"),
        (partial(Polynomial, power=float("nan")), r"power=nan must be"),
        (partial(Polynomial, threshold=-1), r"threshold=-1: .* Use 0 .* or None"),
        (partial(Polynomial, threshold=2.5), r"threshold=2.5 is not a whole number"),
        (partial(DelayCompensation, strength=-1.0), r"strength=-1.0 must be"),
        (partial(DelayCompensation, strength=float("inf")), r"strength=inf must be"),
        (partial(check_weight, 0.0), r"weight=0.0 must be a number above 0"),
        (partial(check_weight, float("inf")), r"weight=inf must be"),
    ],
)
def test_impossible_settings_are_refused_with_advice(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("correction", [Polynomial(), Polynomial(power=0.0), DelayCompensation(strength=0.5)], ids=repr)
@pytest.mark.parametrize("given", [False, True])
def test_a_weight_is_multiplied_in_whatever_is_done_besides(correction, given):
    generator = torch.Generator().manual_seed(0)
    params, dispatched, delta = (Tree.of({"w": torch.randn(700, 500, generator=generator)}) for _ in range(3))
    plain = correction.correct(params, Arrival(delta, dispatched, staleness=3, workers=4))
    mine = delta.copy().donate() if given else delta
    weighted = correction.correct(params, Arrival(mine, dispatched, staleness=3, workers=4), 0.25)
    assert torch.allclose(weighted.flat, 0.25 * plain.flat, rtol=1e-6, atol=0)
    assert mine.deleted == given
