"""Codecs: exact byte counts, errors within their bounds, error feedback that loses nothing, and refusals of other bytes."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from atoll.core.errors import ConfigError
from atoll.core.protocols import Work
from atoll.optim import codecs
from atoll.optim.codecs import BLOCK, CHUNK, CODECS, E3M0, WINDOW, BFloat16, Int, Int2, TopK, encoding_of
from atoll.runs.cluster import Link, all_reduce_cost
from atoll.testing.fakes import ScriptedPeers

NAMED = {name: codec for name, codec in CODECS.items() if codec is not None}


@pytest.fixture(params=NAMED)
def codec(request):
    return NAMED[request.param]


def seen(codec, values):
    return codec.decode(codec.encode(values), values.numel())


def normal(count, seed=0, scale=1.0):
    return scale * torch.randn(count, generator=torch.Generator().manual_seed(seed))


BYTES = {  # of this many values, by the table of the page: scales of 2 bytes, blocks of 256 and chunks of 4,096 values
    "bf16": lambda count: 2 * count,
    "bf16-stochastic": lambda count: 2 * count,
    "int8": lambda count: -(-count // 256) * (2 + 256),
    "int4": lambda count: -(-count // 256) * (2 + 128),
    "fp4": lambda count: -(-count // 256) * (2 + 128),
    "int2": lambda count: -(-count // 256) * (2 * 2 + 64),
    "topk": lambda count: -(-count // 4096) * (2 * 2 + 64 * 12 // 8 + 64 * 2 // 8),
}


@given(count=st.integers(1, 3 * CHUNK), seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_bytes_are_those_of_the_formula(count, seed):
    assert BYTES.keys() == NAMED.keys()
    for name, codec in NAMED.items():
        assert codec.encode(normal(count, seed)).numel() == codec.nbytes(count) == BYTES[name](count)


def test_values_that_a_codec_can_represent_pass_unchanged(codec):
    read = seen(codec, normal(3 * CHUNK))
    assert torch.equal(seen(codec, read), read)


def test_the_page_says_from_how_many_islands_on_top_k_sends_more():
    """Of a model of 2^20 values per island, by the formulas of the simulator's ledgers, which are those of real exchanges."""

    def sent(name, islands):
        return sum(all_reduce_cost(islands << 20, 4, [Link()] * islands, codec=NAMED[name]).sent_bytes)

    page = (Path(__file__).parents[2] / "docs" / "codecs.md").read_text()
    first = {
        name: next(islands for islands in range(2, 200) if sent(name, islands) < sent("topk", islands))
        for name in ("int2", "int4", "int8", "bf16")
    }
    sentence = re.search(
        r"From (\d+) islands on `int2` .* `topk`, from (\d+) on `int4`, from\s(\d+) on `int8` and from (\d+) on `bf16`", page
    )
    assert [*map(int, sentence.groups())] == [*first.values()]


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


def placed(numel, values):
    """Zeros, but for these values at these indices."""
    whole = torch.zeros(numel)
    whole[[*values]] = torch.tensor([float(value) for value in values.values()])
    return whole


FOUR = [1.0, -1.0, 3.0, -3.0]


@pytest.mark.parametrize(
    ("name", "values", "hexadecimal", "read"),
    [
        ("bf16", torch.tensor([1.0, -2.0, 1 + 2**-8]), "803f 00c0 803f", None),
        # The scale 1.0, and codes in the order of the values.
        ("int8", placed(BLOCK, {0: 127, 1: -63.6, 2: 0.4}), "803f 7fc0" + "00" * 254, placed(BLOCK, {0: 127, 1: -64})),
        # The scale 1.0. Byte j has value j in its low half, and value 128 + j in its high half.
        ("int4", placed(BLOCK, {0: 7, 1: -6.6, 128: 3.4}), "803f 3709" + "00" * 126, placed(BLOCK, {0: 7, 1: -7, 128: 3})),
        # The scale 8.0. Codes 7 and 6 are the largest magnitude and its half, 1 its 64th part, and 8 is the sign.
        ("fp4", placed(BLOCK, {0: 8, 1: -5, 128: 0.12}), "0041 170e" + "00" * 126, placed(BLOCK, {0: 8, 1: -4, 128: 0.125})),
        # The means 1.0 and 3.0. Byte j has the codes of the values j, 64 + j, 128 + j and 192 + j: 1 is large, 2 is negative.
        ("int2", torch.tensor(FOUR * 64), "803f 4040" + "00aa55ff" * 16, torch.tensor(FOUR * 64)),
        # The same means, low bytes of the first and of the second 32 indices, their high halves in one byte, and 64 codes.
        (
            "topk",
            placed(CHUNK, {64 * number: FOUR[number % 4] for number in range(64)}),
            "803f 4040"
            + "004080c0" * 16
            + "".join(f"{high:x}{low:x}" * 4 for low, high in enumerate(range(8, 16)))
            + "00aa55ff" * 4,
            placed(CHUNK, {64 * number: FOUR[number % 4] for number in range(64)}),
        ),
    ],
)
def test_golden_bytes(name, values, hexadecimal, read):
    data = NAMED[name].encode(values)
    assert bytes(data.tolist()) == bytes.fromhex(hexadecimal)
    assert torch.equal(NAMED[name].decode(data, values.numel()), torch.tensor([1.0, -2.0, 1.0]) if read is None else read)


def test_golden_bytes_of_stochastic_rounding_by_integers_of_python():
    def bits(counter):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            counter = (counter ^ counter >> shift) * factor % (1 << 64)
        return counter >> 32 & 0xFFFF

    seed, values = (1 << 55) + 12345, normal(1000)
    given = values.view(torch.int32).tolist()
    rounded = [(bits(seed + index) + value >> 16) & 0xFFFF for index, value in enumerate(given)]
    data = BFloat16(stochastic=True).encode(values, seed=seed)
    assert bytes(data.tolist()) == b"".join(value.to_bytes(2, "little") for value in rounded)


def test_top_k_keeps_the_largest_magnitudes():
    noise = normal(CHUNK)
    kept = seen(TopK(), noise)
    assert (kept != 0).sum() == 64
    assert noise[kept != 0].abs().min() >= noise[kept == 0].abs().max()
    assert (kept.sign() == noise.sign())[kept != 0].all()


def test_top_k_of_everything_is_dense():
    """16 equal blocks have the means of their chunk, and whole numbers add up exactly: every value is what int2 makes of it."""
    block = torch.randint(-99, 100, (BLOCK,), generator=torch.Generator().manual_seed(1)).float()
    values = torch.cat([block.repeat(CHUNK // BLOCK), 5 * block.flip(0).repeat(CHUNK // BLOCK)])
    everything = TopK(kept=CHUNK)
    assert torch.equal(seen(everything, values), seen(Int2(), values))
    assert everything.nbytes(CHUNK) == TopK().nbytes(CHUNK) * CHUNK // 64 - 4 * (CHUNK // 64 - 1)


@pytest.mark.parametrize("kept", [0, 6, CHUNK + 4])
def test_top_k_of_an_impossible_number_is_refused(kept):
    with pytest.raises(ConfigError, match="Use 4 to 4096"):
        TopK(kept=kept)


def test_zeros_among_other_values_add_nothing_in_two_bits():
    """Their codes have either sign equally often, so the sum of what is read does not drift by the small mean."""
    values = placed(BLOCK, {4 * index + index % 2: (1, -1, 9, -9)[index % 4] for index in range(BLOCK // 4)})
    read = seen(Int2(), values)
    assert read[values == 0].abs().min() > 0, "no code of two bits is 0"
    assert read.sum() == values.sum() == 0


def test_stochastic_rounding_has_the_right_mean_and_depends_on_the_seed_alone():
    codec, values = BFloat16(stochastic=True), torch.full((1 << 16,), 1.0 + 2**-10)  # an eighth of the way to the next bf16
    rounded = codec.decode(codec.encode(values, seed=3), values.numel())
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert rounded.mean().item() == pytest.approx(values[0].item(), abs=1e-4)
    assert torch.equal(codec.encode(values, seed=3), codec.encode(values, seed=3))
    assert not torch.equal(codec.encode(values, seed=3), codec.encode(values, seed=4))


BUFFERS = {"bf16": 0.003, "bf16-stochastic": 0.004, "int8": 0.01, "int4": 0.15, "fp4": 0.25, "int2": 6.0, "topk": 32.0}
"""The most that an error buffer holds, in deltas: 64 of 4,096 values in 64 rounds are all of them, half a round late on average."""


def test_with_feedback_what_is_unsent_of_a_hundred_equal_deltas_does_not_grow_with_them():
    """A codec without this property, whose values are too small or on the wrong side, would owe up to a hundred deltas."""
    delta = normal(CHUNK)
    for name, codec in NAMED.items():
        error = torch.zeros(CHUNK)
        for round_ in range(100):
            error += delta
            error -= codec.decode(codec.encode(error, seed=round_), CHUNK)
        assert 0 < error.norm() < BUFFERS[name] * delta.norm(), name


@pytest.mark.parametrize(
    "bits", [0x7FC00000, 0x7FFFFFFF, -1, 0x7F800000, -0x800000], ids=["nan", "cuda-nan", "-nan", "inf", "-inf"]
)
def test_what_is_not_finite_is_read_as_not_finite_and_spoils_no_other_unit(codec, bits):
    values, at = normal(2 * CHUNK), CHUNK + 1000
    values.view(torch.int32)[at] = bits
    read = seen(codec, values)
    start = at // codec.unit * codec.unit
    assert not read[start : start + codec.unit].isfinite().all()
    assert read[:start].isfinite().all()
    assert read[start + codec.unit :].isfinite().all()


def test_encoding_in_windows_of_whole_units_gives_the_same_bytes(codec):
    values = normal(1 << 18)
    whole = codec.encode(values, seed=5)
    parts = [codec.encode(values[at : at + (1 << 16)], seed=5 + at) for at in range(0, 1 << 18, 1 << 16)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("at_a_time", [2, 64])
def test_bytes_and_values_do_not_depend_on_how_many_windows_are_computed_at_a_time(codec, at_a_time, monkeypatch):
    """As on a GPU, where each kernel computes 64 of them."""
    values = normal(5 * WINDOW + 1000)
    data = codec.encode(values, seed=5)
    read = codec.decode(data, values.numel())
    monkeypatch.setitem(codecs._WINDOWS, "cpu", at_a_time)
    assert torch.equal(codec.encode(values, seed=5), data)
    assert torch.equal(codec.decode(data, values.numel()), read)


def test_two_islands_at_one_position_of_the_schedule_do_not_share_their_rounding_noise():
    """Also a joiner of an elastic run, which has rank 0 as yet: its data are others."""
    one = Work(shard=0, start=0, schedule=8, examples=1)
    works = [one, Work(shard=1, start=0, schedule=8, examples=1), Work(shard=0, start=4, schedule=8, examples=1)]
    assert len({encoding_of("bf16-stochastic", work, ScriptedPeers()).seed for work in works}) == 3


def test_zeros_stay_zeros(codec):
    assert torch.equal(seen(codec, torch.zeros(5000)), torch.zeros(5000))


@pytest.mark.parametrize("name", ["int8", "int4", "fp4"])
def test_a_block_whose_scale_is_subnormal_becomes_zeros(name):
    """The inverse of such a scale is infinite: a zero times that is NaN, and the other values would get the block's largest one."""
    for scale in (2.0**-127, 2.0**-129, 2.0**-133):
        values = torch.zeros(BLOCK)
        values[1:] = torch.linspace(-scale, scale, BLOCK - 1)
        assert torch.equal(seen(NAMED[name], values), torch.zeros(BLOCK))


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data.float(), lambda data: data.repeat(2)])
def test_other_bytes_are_refused(codec, change):
    data = codec.encode(normal(1000))
    with pytest.raises(ValueError, match="encode no 1000 values"):
        codec.decode(change(data), 1000)
