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

Blocks and chunks are counted from the first value that is encoded. Values may be encoded in windows: the bytes of a window are the
same wherever it lies, and a window of whole units adds no byte to the sum. Scales are bf16, whose range is that of fp32: deltas of
1e-8 would vanish in fp16.

A codec loses a part of the values. An algorithm that keeps this part and adds it to the next values sends all of it in the end
(error feedback): see `unsent`. A codec turns NaN and infinity into numbers, so the caller looks for them first.

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
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from atoll.core.errors import ConfigError
from atoll.core.protocols import Codec, Encoding, Peers, Work

BLOCK = 256
"""Values that share a scale."""
CHUNK, KEPT = 4096, 64
"""Of every chunk of values `TopK` keeps this many."""
WINDOW = 1 << 16
"""Values that are encoded at a time: their temporaries stay in cache. A multiple of every unit."""
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
        for at in range(0, values.numel(), WINDOW):
            window = values[at : at + WINDOW]
            self._encode(self._padded(window), out[self.nbytes(at) : self.nbytes(at + window.numel())], seed + at)
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
        for at in range(0, numel, WINDOW):
            window = out[at : at + WINDOW]
            part = data[self.nbytes(at) : self.nbytes(at + window.numel())]
            whole = window if window.numel() % self.unit == 0 else torch.empty(self._up(window.numel()), device=data.device)
            self._decode(part, whole)
            if whole is not window:
                window.copy_(whole[: window.numel()])
        return out

    def unsent(self, values: Tensor, data: Tensor) -> Tensor:
        """What the encoded form leaves out of these values: their error, to be added to the next ones. Computed in `values`."""
        for at in range(0, values.numel(), WINDOW):
            window = values[at : at + WINDOW]
            window -= self.decode(data[self.nbytes(at) : self.nbytes(at + window.numel())], window.numel())
        return values

    def _up(self, numel: int) -> int:
        return math.ceil(numel / self.unit) * self.unit

    def _padded(self, window: Tensor) -> Tensor:
        return torch.nn.functional.pad(window, (0, self._up(window.numel()) - window.numel()))

    @abstractmethod
    def _encode(self, values: Tensor, out: Tensor, seed: int) -> None:
        """Encodes whole units into these bytes."""

    @abstractmethod
    def _decode(self, data: Tensor, out: Tensor) -> None:
        """Decodes whole units into these values."""


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
        target = out.view(torch.bfloat16)
        if not self.stochastic:
            target.copy_(values)
            return
        generator = torch.Generator(values.device).manual_seed(seed)
        noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
        noise += values.view(torch.int32)  # of a finite value: its exponent may grow, its sign stays
        target.view(torch.int16).copy_(noise >> 16)

    def _decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(data.view(torch.bfloat16))


@dataclass(frozen=True)
class Int(_WindowedCodec):
    """Even steps from minus to plus a block's largest magnitude, of 8 or 4 bits."""

    bits: Literal[8, 4] = 8

    @property
    def unit_bytes(self) -> int:
        return _SCALE_BYTES + BLOCK * self.bits // 8

    @property
    def _most(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def _encode(self, values: Tensor, out: Tensor, seed: int) -> None:
        blocks = values.view(-1, BLOCK)
        codes = blocks.abs()
        scales = (codes.amax(1) / self._most).to(torch.bfloat16)
        torch.mul(blocks, _inverse(scales)[:, None], out=codes).round_().clamp_(-self._most, self._most)
        written, payload = _split(out, len(blocks), 1)
        written.copy_(scales[:, None])
        if self.bits == 8:
            payload.view(torch.int8).copy_(codes)
        else:
            _pack_nibbles(codes.to(torch.int8).view(torch.uint8), payload)

    def _decode(self, data: Tensor, out: Tensor) -> None:
        blocks = out.view(-1, BLOCK)
        scales, payload = _split(data, len(blocks), 1)
        if self.bits == 8:
            blocks.copy_(payload.view(torch.int8))
        else:
            low, high = payload.view(torch.int8) << 4, payload.view(torch.int8)
            blocks[:, : BLOCK // 2].copy_(low >> 4)  # an arithmetic shift keeps the sign
            blocks[:, BLOCK // 2 :].copy_(high >> 4)
        blocks *= scales.float()


@dataclass(frozen=True)
class E3M0(_WindowedCodec):
    """4 bits: a sign and an exponent of 3 bits, no mantissa (Streaming DiLoCo). Magnitudes are rounded to the nearest power of two
    on a logarithmic scale. Those below 1/64 of the block's largest magnitude, rounded so, become 0."""

    @property
    def unit_bytes(self) -> int:
        return _SCALE_BYTES + BLOCK // 2

    def _encode(self, values: Tensor, out: Tensor, seed: int) -> None:
        blocks = values.view(-1, BLOCK)
        codes = blocks.abs()
        scales = codes.amax(1).to(torch.bfloat16)
        codes *= _inverse(scales)[:, None]
        # The exponent after rounding at the square root of two, the middle of two powers on a logarithmic scale.
        exponents = codes.view(torch.int32).add_(_ROUND_AT_SQRT2).bitwise_right_shift_(23).sub_(127 - 7)
        exponents.clamp_(0, 7)  # 7 is the block's largest magnitude, 1 its 64th part, 0 is zero
        exponents |= (blocks < 0).to(torch.int32) << 3
        written, payload = _split(out, len(blocks), 1)
        written.copy_(scales[:, None])
        _pack_nibbles(exponents.to(torch.uint8), payload)

    def _decode(self, data: Tensor, out: Tensor) -> None:
        blocks = out.view(-1, BLOCK)
        scales, payload = _split(data, len(blocks), 1)
        powers = _POWERS.to(data.device)
        blocks[:, : BLOCK // 2] = powers[(payload & 15).int()]
        blocks[:, BLOCK // 2 :] = powers[(payload >> 4).int()]
        blocks *= scales.float()


_ROUND_AT_SQRT2 = (1 << 23) - 0x3504F3  # 0x3504F3 is the mantissa of the square root of two
_POWERS = torch.tensor([0.0, *(2.0 ** (code - 7) for code in range(1, 8))])
_POWERS = torch.cat([_POWERS, -_POWERS])


@dataclass(frozen=True)
class Int2(_WindowedCodec):
    """2 bits: a sign, and whether a magnitude exceeds the block's mean. It becomes the mean of the magnitudes on its side
    (a statistical quantiser: steps of even width would leave most values at 0)."""

    @property
    def unit_bytes(self) -> int:
        return 2 * _SCALE_BYTES + BLOCK // 4

    def _encode(self, values: Tensor, out: Tensor, seed: int) -> None:
        blocks = values.view(-1, BLOCK)
        codes, levels = _two_levels(blocks)
        written, payload = _split(out, len(blocks), 2)
        written.copy_(levels)
        _pack_quarters(codes, payload)

    def _decode(self, data: Tensor, out: Tensor) -> None:
        blocks = out.view(-1, BLOCK)
        levels, payload = _split(data, len(blocks), 2)
        _from_two_levels(_unpack_quarters(payload), levels, blocks)


@dataclass(frozen=True)
class TopK(_WindowedCodec):
    """The largest magnitudes of every chunk, with 12 bits for the place of each and 2 bits for its value, as in `Int2`.

    Islands gather all encoded values: the sum of sparse values is less sparse. So the bytes that an island receives grow with the
    number of islands.
    """

    unit: ClassVar[int] = CHUNK
    gathers: ClassVar[bool] = True

    @property
    def unit_bytes(self) -> int:
        return 2 * _SCALE_BYTES + KEPT * _INDEX_BITS // 8 + KEPT // 4

    def _encode(self, values: Tensor, out: Tensor, seed: int) -> None:
        chunks = values.view(-1, CHUNK)
        # In order of their places, so that equal values have equal bytes on every device.
        places = chunks.abs().topk(KEPT, 1, sorted=False).indices.sort(1).values
        codes, levels = _two_levels(chunks.gather(1, places))
        written, payload = _split(out, len(chunks), 2)
        written.copy_(levels)
        _pack_places(places, payload[:, : -KEPT // 4])
        _pack_quarters(codes, payload[:, -KEPT // 4 :])

    def _decode(self, data: Tensor, out: Tensor) -> None:
        chunks = out.view(-1, CHUNK)
        levels, payload = _split(data, len(chunks), 2)
        kept = torch.empty(len(chunks), KEPT, device=data.device)
        _from_two_levels(_unpack_quarters(payload[:, -KEPT // 4 :]), levels, kept)
        chunks.zero_().scatter_(1, _unpack_places(payload[:, : -KEPT // 4]), kept)


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
    position on the schedule and on the rank, and on nothing that differs between engines."""
    codec = CODECS[name]
    if codec is None:
        return None
    drawn = hashlib.blake2b(f"{work.schedule} {peers.rank}".encode(), digest_size=7).digest()
    return Encoding(codec, int.from_bytes(drawn, "little"))


def check_feedback(feedback: float) -> None:
    if not 0 <= feedback <= 1:
        raise ConfigError(
            f"feedback={feedback}: it is the share of what a codec left out that is sent later, from 0 to 1. Use 1 to lose nothing."
        )


# ----------------------------------------------------------------------------------------------------------------------- bits


def _split(data: Tensor, units: int, scales: int) -> tuple[Tensor, Tensor]:
    """The scales of all units, and their payloads: a window has all scales first, then the payload of unit after unit."""
    head = units * scales * _SCALE_BYTES
    return data[:head].view(torch.bfloat16).view(units, scales), data[head:].view(units, -1)


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale, and 0 for a block of zeros, or of magnitudes below the smallest scale."""
    wide = scales.float()
    return torch.where(wide > 0, 1 / wide, 0.0)


def _two_levels(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 2 bits (1: large, 2: negative), and the means of each row's small and large magnitudes as bf16."""
    magnitudes = rows.abs()
    large = magnitudes > magnitudes.mean(1, keepdim=True)
    count = large.sum(1)
    sum_large = (magnitudes * large).sum(1)
    high = sum_large / count.clamp(min=1)
    low = (magnitudes * ~large).sum(1) / (rows.shape[1] - count).clamp(min=1)
    codes = large.to(torch.uint8) | ((rows < 0).to(torch.uint8) << 1)
    return codes, torch.stack([low, high], 1).to(torch.bfloat16)


def _from_two_levels(codes: Tensor, levels: Tensor, out: Tensor) -> None:
    wide = levels.float()
    torch.where((codes & 1).bool(), wide[:, 1:], wide[:, :1], out=out)
    out.mul_(1.0 - (codes & 2).to(torch.float32))


def _pack_nibbles(codes: Tensor, out: Tensor) -> None:
    """Two codes a byte: the first half of a row in the low bits, the second in the high bits, so that all accesses are in order."""
    half = codes.shape[1] // 2
    torch.bitwise_or(codes[:, :half] & 15, codes[:, half:] << 4, out=out)


def _pack_quarters(codes: Tensor, out: Tensor) -> None:
    """Four codes a byte, a quarter of a row in each pair of bits."""
    first, second, third, fourth = codes.chunk(4, 1)
    torch.bitwise_or(first | second << 2, third << 4 | fourth << 6, out=out)


def _unpack_quarters(data: Tensor) -> Tensor:
    return torch.cat([data & 3, data >> 2 & 3, data >> 4 & 3, data >> 6], 1)


def _pack_places(places: Tensor, out: Tensor) -> None:
    """Two places of 12 bits in three bytes."""
    first, second = places.chunk(2, 1)
    out.copy_(torch.cat([first & 255, second & 255, first >> 8 | second >> 8 << 4], 1))


def _unpack_places(data: Tensor) -> Tensor:
    low, middle, high = data.long().chunk(3, 1)
    return torch.cat([low | (high & 15) << 8, middle | high >> 4 << 8], 1)
