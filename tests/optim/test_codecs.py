"""Codecs: exact byte counts, errors within their bounds, error feedback that loses nothing, and refusals of other bytes."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from atoll.optim.codecs import BLOCK, CHUNK, CODECS, E3M0, KEPT, BFloat16, Int, Int2, TopK

NAMED = {name: codec for name, codec in CODECS.items() if codec is not None}


@pytest.fixture(params=NAMED)
def codec(request):
    return NAMED[request.param]


def seen(codec, values):
    return codec.decode(codec.encode(values), values.numel())


def normal(count, seed=0, scale=1.0):
    return scale * torch.randn(count, generator=torch.Generator().manual_seed(seed))


@given(count=st.integers(1, 3 * CHUNK), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_bytes_are_counted_exactly_and_what_is_unsent_is_the_error(count, seed):
    values = normal(count, seed)
    for codec in NAMED.values():
        data = codec.encode(values)
        assert data.numel() == codec.nbytes(count)
        read = codec.decode(data, count)
        assert torch.equal(codec.unsent(values.clone(), data), values - read)


def test_values_that_a_codec_can_represent_pass_unchanged(codec):
    read = seen(codec, normal(3 * CHUNK))
    assert torch.equal(seen(codec, read), read)


def test_formula_of_bytes():
    million = 1 << 20
    assert BFloat16().nbytes(million) == 2 * million
    assert Int(bits=8).nbytes(million) == million + 2 * million // BLOCK
    assert Int(bits=4).nbytes(million) == E3M0().nbytes(million) == million // 2 + 2 * million // BLOCK
    assert Int2().nbytes(million) == million // 4 + 4 * million // BLOCK
    assert TopK().nbytes(million) == million // CHUNK * (KEPT * 14 // 8 + 4)


@pytest.mark.parametrize("scale", [1e-20, 1e-6, 1.0, 1e20])
def test_errors_are_bounded_at_every_scale(scale):
    values = normal(64 * BLOCK, scale=scale)
    largest = values.view(-1, BLOCK).abs().amax(1)
    for bits in (8, 4):
        error = (seen(Int(bits=bits), values) - values).view(-1, BLOCK).abs().amax(1)
        # Half a step, and what rounding the scale to bf16 can cut off the largest magnitude.
        assert (error <= largest * (0.5 / (2 ** (bits - 1) - 1) + 2**-8)).all()
    ratio = seen(E3M0(), values) / values
    kept = ratio != 0
    assert ratio[kept].min() > 0.7, "powers of two within a factor of the square root of two"
    assert ratio[kept].max() < 1.42
    assert (values[~kept].abs() <= largest.repeat_interleave(BLOCK)[~kept] / 64).all()


def test_golden_codes():
    block = torch.zeros(BLOCK)
    block[:5] = torch.tensor([7.0, -7.0, 3.4, -0.6, 0.4])
    assert seen(Int(bits=4), block)[:5].tolist() == [7.0, -7.0, 3.0, -1.0, 0.0]
    block[:5] = torch.tensor([8.0, -5.0, 0.75, 0.12, 0.05])
    assert seen(E3M0(), block)[:5].tolist() == [8.0, -4.0, 1.0, 0.125, 0.0]
    magnitudes = torch.tensor([1.0, -1.0, 3.0, -3.0]).repeat(BLOCK // 4)
    assert torch.equal(seen(Int2(), magnitudes), magnitudes), "two magnitudes are exact"


def test_top_k_keeps_the_largest_and_top_k_of_everything_is_dense():
    values = torch.zeros(2 * CHUNK)
    places = torch.randperm(CHUNK, generator=torch.Generator().manual_seed(1))[:KEPT]
    values[places], values[CHUNK + places] = 1.0, -2.0
    assert torch.equal(seen(TopK(), values), values)
    noise = normal(CHUNK)
    kept = seen(TopK(), noise)
    assert (kept != 0).sum() == KEPT
    assert noise[kept != 0].abs().min() >= noise[kept == 0].abs().max()
    assert (kept.sign() == noise.sign())[kept != 0].all()


def test_stochastic_rounding_has_the_right_mean_and_depends_on_the_seed_alone():
    codec, values = BFloat16(stochastic=True), torch.full((1 << 16,), 1.0 + 2**-10)  # an eighth of the way to the next bf16
    rounded = codec.decode(codec.encode(values, seed=3), values.numel())
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert rounded.mean().item() == pytest.approx(values[0].item(), abs=1e-4)
    assert torch.equal(codec.encode(values, seed=3), codec.encode(values, seed=3))
    assert not torch.equal(codec.encode(values, seed=3), codec.encode(values, seed=4))


def test_with_feedback_the_sum_of_what_was_sent_and_what_is_owed_is_exact(codec):
    owed, sent, wanted = torch.zeros(CHUNK), torch.zeros(CHUNK, dtype=torch.float64), torch.zeros(CHUNK, dtype=torch.float64)
    for round_ in range(20):
        delta = normal(CHUNK, seed=round_)
        wanted += delta
        owed += delta
        data = codec.encode(owed, seed=round_)
        sent += codec.decode(data, CHUNK)
        owed = codec.unsent(owed, data)
    assert torch.allclose(sent + owed, wanted, atol=1e-5)


def test_encoding_in_windows_of_whole_units_gives_the_same_bytes(codec):
    values = normal(1 << 18)
    whole = codec.encode(values, seed=5)
    parts = [codec.encode(values[at : at + (1 << 16)], seed=5 + at) for at in range(0, 1 << 18, 1 << 16)]
    assert torch.equal(torch.cat(parts), whole)


def test_zeros_stay_zeros(codec):
    assert torch.equal(seen(codec, torch.zeros(5000)), torch.zeros(5000))


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data.float(), lambda data: data.repeat(2)])
def test_other_bytes_are_refused(codec, change):
    data = codec.encode(normal(1000))
    with pytest.raises(ValueError, match="encode no 1000 values"):
        codec.decode(change(data), 1000)
