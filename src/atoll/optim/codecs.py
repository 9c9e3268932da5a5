"""Codecs: short encodings of the values that islands exchange, each with an exact count of bytes.

A codec is a pure value. `encode` writes fp32 values as bytes, `decode` reads them back, and `nbytes` is the number of bytes, which
depends on the number of values alone.

    codec              bits a value                 what a value becomes
    bf16               16                           rounded to nearest, or at random with the right mean (stochastic)
    int8               8    + 16 a block of 256     one of 255 even steps up to the block's largest magnitude
    int4               4    + 16 a block            one of 15 such steps
    fp4 (E3M0)         4    + 16 a block            sign and power of two: 1, 1/2 ... 1/64 of the block's largest magnitude, or 0
    int2               2    + 32 a block            sign, and the mean of the block's small or of its large magnitudes
    topk               0.23 in all                  of every 4,096 values the 64 largest magnitudes, each as in int2; others are 0

Blocks and chunks are counted from the first value that is encoded. Every 65,536 values are a window, which has its scales first:
the bytes of a window are the same wherever it lies, and a window of whole units adds no byte to the sum. The bytes do not depend on
the device, but for the last bit of the means of int2 and topk. Scales are bf16, whose range is that of fp32: deltas of 1e-8 would
vanish in fp16.

A codec loses a part of the values. An algorithm that keeps this part and adds it to the next values sends all of it in the end
(error feedback). A NaN or an infinity leaves no number in its block (of top-k: among the values kept of its chunk; of bf16: in its
place), so what is decoded is not finite either. A caller that wants to keep the other values looks for them first.

>>> values = torch.linspace(-1, 1, 256)
>>> [Int(bits=bits).nbytes(256) for bits in (8, 4)], TopK().nbytes(4096)
([258, 130], 116)
>>> data = Int(bits=8).encode(values)
>>> (Int(bits=8).decode(data, 256) - values).abs().max() < 1 / 127
tensor(True)
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.protocols import Codec, Encoding, Peers, Work

BLOCK = 256
"""Values that share a scale."""
CHUNK = 4096
"""Values of which `TopK` keeps the largest."""
WINDOW = 1 << 16
"""Values whose scales lie together. A multiple of every unit."""
_WINDOWS = {"cpu": 1}
"""Windows that are computed at a time, by the type of device: on a CPU the temporaries of one stay in cache."""
_WINDOWS_ELSEWHERE = 64
_SCALE_BYTES = 2
_INDEX_BITS = 12
assert 1 << _INDEX_BITS == CHUNK

CodecName = Literal["fp32", "bf16", "bf16-stochastic", "int8", "int4", "fp4", "int2", "topk"]


class _WindowedCodec(ABC):
    """Encodes fp32 values. Subclasses encode one window of whole units."""

    unit: ClassVar[int] = BLOCK
    """Values that are encoded together; the last unit of a tensor is padded with zeros."""
    gathers: ClassVar[bool] = False
    """Whether islands gather each other's encoded values instead of reducing them slice by slice."""

    @property
    @abstractmethod
    def unit_bytes(self) -> int:
        """Encoded size of a unit."""

    def nbytes(self, numel: int) -> int:
        """Encoded size of this many values."""
        return math.ceil(numel / self.unit) * self.unit_bytes

    def encode(self, values: Tensor, seed: int = 0) -> Tensor:
        """The bytes of a flat fp32 tensor. The seed is that of stochastic rounding."""
        assert values.dtype == torch.float32, values.dtype
        assert values.dim() == 1, values.shape
        out = torch.empty(self.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
        for start, stop, windows in _spans(values):
            padded = torch.nn.functional.pad(values[start:stop], (0, -(stop - start) % self.unit))
            self._encode(padded.view(windows, -1, self.unit), self._part(out, start, stop).view(windows, -1), seed + start)
        return out

    def decode(self, data: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """The fp32 values that these bytes stand for, in `out` if it is given.

        Raises:
            ValueError: these are not the bytes of so many values.
        """
        if data.dtype != torch.uint8 or data.shape != (self.nbytes(numel),):
            raise ValueError(
                f"{data.numel()} values of {data.dtype} encode no {numel} values with {self}: those have {self.nbytes(numel)} bytes"
            )
        out = torch.empty(numel, dtype=torch.float32, device=data.device) if out is None else out
        for start, stop, windows in _spans(out):
            span, missing = out[start:stop], -(stop - start) % self.unit
            whole = torch.empty(stop - start + missing, device=data.device) if missing else span
            self._decode(self._part(data, start, stop).view(windows, -1), whole.view(windows, -1, self.unit))
            if missing:
                span.copy_(whole[: stop - start])
        return out

    def _part(self, data: Tensor, start: int, stop: int) -> Tensor:
        """The bytes of these values, which begin at a window."""
        return data[self.nbytes(start) : self.nbytes(stop)]

    @abstractmethod
    def _encode(self, values: Tensor, out: Tensor, seed: int) -> None:
        """Encodes windows of whole units (windows, units, values of a unit) into these bytes (windows, bytes of a window)."""

    @abstractmethod
    def _decode(self, data: Tensor, out: Tensor) -> None:
        """Decodes windows (windows, bytes of a window) into these values (windows, units, values of a unit)."""


@dataclass(frozen=True)
class BFloat16(_WindowedCodec):
    """The upper half of each value's bits. Stochastic: the lower half is the probability to round away from zero, so that the mean
    of many roundings is the value."""

    stochastic: bool = False

    unit: ClassVar[int] = 1

    @property
    def unit_bytes(self) -> int:
        return 2

    def _encode(self, values: Tensor, out: Tensor, seed: int) -> None:
        values = values.flatten(1)
        if not self.stochastic:
            out.view(torch.bfloat16).copy_(values)
            return
        noise = _random_bits(seed, values.numel(), values.device).view(values.shape)
        noise += values.view(torch.int32)  # the exponent may grow, the sign stays; but a NaN of all ones, as of CUDA, would be -0
        out.view(torch.int16).copy_((noise >> 16).masked_fill_(values.isnan(), _NAN))

    def _decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(data.view(torch.bfloat16)[..., None])


_NAN = 0x7FC0  # in bf16


def _random_bits(counter: int, count: int, device: torch.device) -> Tensor:
    """16 bits, as int32, for each of so many counters: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014). Integers are the
    same on all devices, whose random generators differ."""
    bits = torch.arange(counter, counter + count, device=device)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= (bits >> shift).bitwise_and_((1 << 64 - shift) - 1)  # a logical shift
        bits *= factor - (1 << 64)
    return (bits >> 32).bitwise_and_(0xFFFF).to(torch.int32)


@dataclass(frozen=True)
class Int(_WindowedCodec):
    """Even steps from minus to plus a block's largest magnitude, of 8 or 4 bits."""

    bits: Literal[8, 4] = 8

    @property
    def unit_bytes(self) -> int:
        return _SCALE_BYTES + BLOCK * self.bits // 8

    @property
    def _largest_code(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def _encode(self, values: Tensor, out: Tensor, seed: int) -> None:
        codes = values.abs()
        scales = (codes.amax(-1, keepdim=True) / self._largest_code).to(torch.bfloat16)
        torch.mul(values, _inverse(scales), out=codes).round_().clamp_(-self._largest_code, self._largest_code)
        written, payload = _split(out, values.shape[1], 1)
        written.copy_(scales)
        if self.bits == 8:
            payload.view(torch.int8).copy_(codes)
        else:
            _pack_nibbles(codes.to(torch.int8).view(torch.uint8), payload)

    def _decode(self, data: Tensor, out: Tensor) -> None:
        scales, payload = _split(data, out.shape[1], 1)
        if self.bits == 8:
            out.copy_(payload.view(torch.int8))
        else:
            low, high = payload.view(torch.int8) << 4, payload.view(torch.int8)
            out[..., : BLOCK // 2].copy_(low >> 4)  # an arithmetic shift keeps the sign
            out[..., BLOCK // 2 :].copy_(high >> 4)
        out *= scales.float()


@dataclass(frozen=True)
class E3M0(_WindowedCodec):
    """4 bits: a sign and an exponent of 3 bits, no mantissa (Streaming DiLoCo). Magnitudes are rounded to the nearest power of two
    on a logarithmic scale. Those below 1/64 of the block's largest magnitude, rounded so, become 0."""

    @property
    def unit_bytes(self) -> int:
        return _SCALE_BYTES + BLOCK // 2

    def _encode(self, values: Tensor, out: Tensor, seed: int) -> None:
        codes = values.abs()
        scales = codes.amax(-1, keepdim=True).to(torch.bfloat16)
        codes *= _inverse(scales)
        # The exponent after rounding at the square root of two, the middle of two powers on a logarithmic scale.
        exponents = codes.view(torch.int32).add_(_ROUND_AT_SQRT2).bitwise_right_shift_(23).sub_(127 - 7)
        exponents.clamp_(0, 7)  # 7 is the block's largest magnitude, 1 its 64th part, 0 is zero
        exponents |= (values < 0).to(torch.int32) << 3
        written, payload = _split(out, values.shape[1], 1)
        written.copy_(scales)
        _pack_nibbles(exponents.to(torch.uint8), payload)

    def _decode(self, data: Tensor, out: Tensor) -> None:
        scales, payload = _split(data, out.shape[1], 1)
        powers = _powers(data.device)
        out[..., : BLOCK // 2] = powers[(payload & 15).int()]
        out[..., BLOCK // 2 :] = powers[(payload >> 4).int()]
        out *= scales.float()


_ROUND_AT_SQRT2 = (1 << 23) - 0x3504F3  # 0x3504F3 is the mantissa of the square root of two


@cache
def _powers(device: torch.device) -> Tensor:
    """The value of each code, as a share of the block's largest magnitude."""
    powers = torch.tensor([0.0, *(2.0 ** (code - 7) for code in range(1, 8))], device=device)
    return torch.cat([powers, -powers])


@dataclass(frozen=True)
class Int2(_WindowedCodec):
    """2 bits: a sign, and whether a magnitude exceeds the block's mean. It becomes the mean of the magnitudes on its side
    (a statistical quantiser: steps of even width would leave most values at 0). No code is 0: every second position of a block
    gives a zero the minus, so that zeros add nothing on average."""

    @property
    def unit_bytes(self) -> int:
        return 2 * _SCALE_BYTES + BLOCK // 4

    def _encode(self, values: Tensor, out: Tensor, seed: int) -> None:
        codes, levels = _two_levels(values)
        written, payload = _split(out, values.shape[1], 2)
        written.copy_(levels)
        _pack_quarters(codes, payload)

    def _decode(self, data: Tensor, out: Tensor) -> None:
        levels, payload = _split(data, out.shape[1], 2)
        _from_two_levels(_unpack_quarters(payload), levels, out)


@dataclass(frozen=True)
class TopK(_WindowedCodec):
    """The largest magnitudes of every chunk, with 12 bits for the index of each and 2 bits for its value, as in `Int2`.

    Islands gather all encoded values: the sum of sparse values is less sparse. So the bytes that an island receives grow with the
    number of islands.

    Args:
        kept: values of each chunk of 4,096. 64 are 1.56 %, a density of SparseLoCo's paper.
    """

    kept: int = 64

    unit: ClassVar[int] = CHUNK
    gathers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.kept % 4 or not 0 < self.kept <= CHUNK:
            raise ConfigError(f"kept={self.kept}: of {CHUNK} values top-k keeps a multiple of 4. Use 4 to {CHUNK}.")

    @property
    def unit_bytes(self) -> int:
        return 2 * _SCALE_BYTES + self.kept * _INDEX_BITS // 8 + self.kept // 4

    def _encode(self, values: Tensor, out: Tensor, seed: int) -> None:
        # Magnitudes are in the order of their bits, and integers compare faster: floats are tested for NaN each time. In order of
        # their indices, so that equal values have equal bytes on every device.
        indices = values.abs().view(torch.int32).topk(self.kept, sorted=False).indices.sort().values
        codes, levels = _two_levels(values.gather(-1, indices))
        written, payload = _split(out, values.shape[1], 2)
        written.copy_(levels)
        _pack_indices(indices, payload[..., : -self.kept // 4])
        _pack_quarters(codes, payload[..., -self.kept // 4 :])

    def _decode(self, data: Tensor, out: Tensor) -> None:
        levels, payload = _split(data, out.shape[1], 2)
        values = torch.empty(*out.shape[:-1], self.kept, device=data.device)
        _from_two_levels(_unpack_quarters(payload[..., -self.kept // 4 :]), levels, values)
        out.zero_().scatter_(-1, _unpack_indices(payload[..., : -self.kept // 4]), values)


CODECS: dict[CodecName, Codec | None] = {
    "fp32": None,
    "bf16": BFloat16(),
    "bf16-stochastic": BFloat16(stochastic=True),
    "int8": Int(bits=8),
    "int4": Int(bits=4),
    "fp4": E3M0(),
    "int2": Int2(),
    "topk": TopK(),
}
"""By the name that a setting has. fp32 is no codec: values travel as they are."""


def encoding_of(name: CodecName, work: Work, peers: Peers) -> Encoding | None:
    """How this island's tree is encoded in the exchange after this work; None: it travels as it is. The seed depends on the
    position on the schedule, on the rank and on the data, and on nothing that differs between engines. A joiner of an elastic run
    has rank 0 until its first commit, but other data than the island with that rank."""
    codec = CODECS[name]
    if codec is None:
        return None
    return Encoding(codec, seed_of(work.schedule, peers.rank, work.shard, work.start))


def seed_of(*names: object) -> int:
    """The seed of an encoding with these names, for stochastic rounding."""
    drawn = hashlib.blake2b(" ".join(map(str, names)).encode(), digest_size=7).digest()
    return int.from_bytes(drawn, "little")


def check_feedback(feedback: float) -> None:
    if not 0 <= feedback <= 1:
        raise ConfigError(
            f"feedback={feedback}: it is the share of what a codec left out that is sent later, from 0 to 1. Use 1 to lose nothing."
        )


# ----------------------------------------------------------------------------------------------------------------------- bits


def _spans(values: Tensor) -> Iterator[tuple[int, int, int]]:
    """Where the values that are computed at a time begin and end, and how many windows they are. A shorter last window is alone."""
    whole = values.numel() // WINDOW * WINDOW
    step = WINDOW * _WINDOWS.get(values.device.type, _WINDOWS_ELSEWHERE)
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        yield start, stop, (stop - start) // WINDOW
    if whole < values.numel():
        yield whole, values.numel(), 1


def _split(data: Tensor, units: int, scales: int) -> tuple[Tensor, Tensor]:
    """The scales of all units of each window, and their payloads: a window has all scales first, then the payload of unit after
    unit."""
    head = units * scales * _SCALE_BYTES
    return data[:, :head].view(torch.bfloat16).view(-1, units, scales), data[:, head:].view(len(data), units, -1)


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale; 0 for a block of zeros, and for a subnormal scale, whose inverse may be infinite."""
    wide = scales.float()
    return torch.where(wide >= torch.finfo(torch.bfloat16).tiny, 1 / wide, 0.0)


def _two_levels(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 2 bits (1: large, 2: negative), and the means of each row's small and large magnitudes as bf16."""
    magnitudes = rows.abs()
    large = magnitudes > magnitudes.mean(-1, keepdim=True)
    count = large.sum(-1)
    high = (magnitudes * large).sum(-1) / count.clamp(min=1)
    low = (magnitudes * ~large).sum(-1) / (rows.shape[-1] - count).clamp(min=1)
    odd = torch.arange(rows.shape[-1], device=rows.device) % 2 == 1
    negative = torch.where(odd, rows <= 0, rows < 0)
    codes = large.to(torch.uint8) | (negative.to(torch.uint8) << 1)
    return codes, torch.stack([low, high], -1).to(torch.bfloat16)


def _from_two_levels(codes: Tensor, levels: Tensor, out: Tensor) -> None:
    wide = levels.float()
    torch.where((codes & 1).bool(), wide[..., 1:], wide[..., :1], out=out)
    out.mul_(1.0 - (codes & 2).to(torch.float32))


def _pack_nibbles(codes: Tensor, out: Tensor) -> None:
    """Two codes a byte: the first half of a row in the low bits, the second in the high bits, so that all accesses are in order."""
    first, second = codes.chunk(2, -1)
    torch.bitwise_or(first & 15, second << 4, out=out)


def _pack_quarters(codes: Tensor, out: Tensor) -> None:
    """Four codes a byte, a quarter of a row in each pair of bits."""
    first, second, third, fourth = codes.chunk(4, -1)
    torch.bitwise_or(first | second << 2, third << 4 | fourth << 6, out=out)


def _unpack_quarters(data: Tensor) -> Tensor:
    return torch.cat([data & 3, data >> 2 & 3, data >> 4 & 3, data >> 6], -1)


def _pack_indices(indices: Tensor, out: Tensor) -> None:
    """Two indices of 12 bits in three bytes."""
    first, second = indices.chunk(2, -1)
    out.copy_(torch.cat([first & 255, second & 255, first >> 8 | second >> 8 << 4], -1))


def _unpack_indices(data: Tensor) -> Tensor:
    low, middle, high = data.long().chunk(3, -1)
    return torch.cat([low | (high & 15) << 8, middle | high >> 4 << 8], -1)
