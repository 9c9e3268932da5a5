"""What is measured on a GPU: shapes of models and batches, how many islands train them, and what that takes of the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from atoll.errors import ConfigError
from atoll.models.gpt import GPT

Way = Literal["apart", "recorded", "stacked"]
"""Islands one after the other as a bare loop computes; one after the other, each pass recorded and replayed; all in one pass, which
is recorded too."""
PRESETS = {"m150": GPT.m150(), "m20": GPT.m20(), "m60": GPT.m60(), "m400": GPT.m400()}
"""In the order in which they are measured: what is asked for most comes first."""
BATCH_SIZES = {"m150": 32, "m20": 64, "m60": 64, "m400": 16}
"""Sequences of an island's batch that fill the device."""
VOCAB_SIZE, SEQ_LEN, SMALL_SEQ_LEN = 32_000, 1024, 256
SMALL_BATCHES = {2: 8, 8: 8, 32: 2}
"""Sequences of batches that do not fill it, and how many rounds of one island the bare loop takes in a turn: a step is short."""
EXAMPLES = 1024
"""Different sequences on the device."""
WAYS: Sequence[Way] = ("apart", "recorded", "stacked")
FEW, MANY, SMALL_MANY = (1, 4, 8), (1, 4, 8, 64), (4, 8, 64)
SHORTER = {"m20": 10, "m60": 10, "m400": 10}
"""Steps of a round at most, by preset: the ratio to the bare loop is asked for of the one that is not here. What lies between two
rounds weighs more in them."""
SHORT_ROUND = 2
"""The same of many islands with large batches, whose round is long all the same."""
SMALL_ROUND = {32: 5}
"""The same of many islands with small batches, by their size."""
FLOPS_FORMULA = (
    "6 N + 12 layers heads head_size seq_len / 2 a token; N: parameters with the output head, without the table of inputs"
)

_ISLAND_BYTES = 20
"""For each parameter: weights, gradients, two moments, and a delta on its way."""
_SHARED_BYTES = 24
"""The same: initial and global weights, the outer momentum, what both become, and the mean."""
_STACK_BYTES = 12
"""The same, for each row of a stack: weights, gradients, and gradients before they are put into their place."""
_LOGIT_BYTES: Mapping[str, int] = {"plain": 16, "stacked": 4}
"""For each token and entry of the vocabulary: logits and their gradients in half precision, and before they are fused in single
precision too."""
_LAYER_BYTES = 80
"""For each token, layer and unit of width: what a forward pass keeps for the way back, before it is fused."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and one island's batch."""

    name: str
    model: GPT
    batch_size: int
    seq_len: int
    vocab_size: int
    bare_steps: int
    """That the bare loop takes in a turn."""

    @property
    def params(self) -> int:
        return self.model.num_params(self.vocab_size)

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch_size * self.seq_len

    @property
    def flops_per_token(self) -> float:
        """Forwards and backwards; see `FLOPS_FORMULA`."""
        model = self.model
        multiplied = self.params - (0 if model.tied else self.vocab_size * model.width)
        return 6 * multiplied + 12 * model.layers * model.heads * model.head_size * self.seq_len / 2

    @property
    def key(self) -> str:
        return f"{self.name} {self.batch_size}x{self.seq_len} ({self.params} parameters)"

    @property
    def words(self) -> str:
        return f"{self.name}, {self.batch_size} x {self.seq_len}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """DiLoCo on some islands of a shape, in turn with the bare loop."""

    shape: Shape
    islands: int
    way: Way
    inner_steps: int
    turns: int

    @property
    def key(self) -> str:
        return f"{self.shape.key} k={self.islands} {self.way} H={self.inner_steps} turns={self.turns}x{self.shape.bare_steps}"

    @property
    def tokens(self) -> int:
        """Of a round of all islands."""
        return self.islands * self.inner_steps * self.shape.tokens

    @property
    def label(self) -> str:
        return f"k={self.islands}, {self.way}"

    @property
    def estimated_bytes(self) -> int:
        """What it takes at most. Before islands train, one of them makes a pass that is not compiled."""
        shape, model = self.shape, self.shape.model
        held = (_ISLAND_BYTES * self.islands + _SHARED_BYTES) * shape.params
        layers = _LAYER_BYTES * model.layers * model.width
        pass_bytes = shape.tokens * (_LOGIT_BYTES["plain"] * shape.vocab_size + layers)
        if self.way == "stacked":
            held += _STACK_BYTES * self.islands * shape.params
            # Fused: a quarter of what the layers keep otherwise.
            fused = self.islands * shape.tokens * (_LOGIT_BYTES["stacked"] * shape.vocab_size + layers // 4)
            pass_bytes = max(pass_bytes, fused)
        return held + pass_bytes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All cells, by their shape, and how large the matrix product is that tells the device's peak."""

    presets: Mapping[Shape, Sequence[Cell]]
    small: Mapping[Shape, Sequence[Cell]]
    matrix: int
    turns: int

    @property
    def groups(self) -> dict[Shape, Sequence[Cell]]:
        """Presets in their order, then small batches."""
        return {**self.presets, **self.small}


def plan_of(
    presets: Sequence[str], batch_sizes: Mapping[str, int], *, inner_steps: int, turns: int, islands: Sequence[int] | None = None
) -> Plan:
    """The measurements that are published.

    Args:
        presets: names of models, in the order of measuring.
        batch_sizes: other than `BATCH_SIZES`, by name.
        inner_steps: of a round; `SHORTER` has less for some.
        turns: of each cell.
        islands: only with so many; none: with all.
    """
    sizes = {**BATCH_SIZES, **batch_sizes}
    large = {}
    for name in presets:
        steps = min(inner_steps, SHORTER.get(name, inner_steps))
        shape = Shape(
            name=name,
            model=PRESETS[name],
            batch_size=sizes[name],
            seq_len=SEQ_LEN,
            vocab_size=VOCAB_SIZE,
            bare_steps=steps,
        )
        large[shape] = cells_of(shape, MANY if name == "m20" else FEW, ["apart"], steps, turns, islands, SHORT_ROUND)
    small = {}
    for size, rounds in SMALL_BATCHES.items():
        shape = Shape(
            name="m20",
            model=PRESETS["m20"],
            batch_size=size,
            seq_len=SMALL_SEQ_LEN,
            vocab_size=VOCAB_SIZE,
            bare_steps=rounds * inner_steps,
        )
        many = SMALL_ROUND.get(size, inner_steps)
        small[shape] = cells_of(shape, SMALL_MANY, WAYS, inner_steps, turns, islands, many)
    return Plan(presets=large, small=small, matrix=8192, turns=turns)


def quick_plan(islands: Sequence[int] | None = None) -> Plan:
    """The same in miniature."""
    model = GPT(layers=1, width=16, heads=2, head_size=8, tied=False)
    shapes = [
        Shape(name=name, model=model, batch_size=size, seq_len=16, vocab_size=64, bare_steps=2)
        for name, size in (("m150", 4), ("m20", 2))
    ]
    return Plan(
        presets={shapes[0]: cells_of(shapes[0], (1, 4, 8), ["apart"], 2, 3, islands, 2)},
        small={shapes[1]: cells_of(shapes[1], (4,), WAYS, 2, 3, islands, 2)},
        matrix=128,
        turns=3,
    )


def cells_of(
    shape: Shape,
    counts: Sequence[int],
    ways: Sequence[Way],
    inner_steps: int,
    turns: int,
    islands: Sequence[int] | None,
    many_steps: int,
) -> list[Cell]:
    """One for each count and way; with more than 8 islands a round has `many_steps`, if that is less."""
    return [
        Cell(
            shape=shape,
            islands=count,
            way=way,
            inner_steps=inner_steps if count <= 8 else min(many_steps, inner_steps),
            turns=turns,
        )
        for count in counts
        for way in ways
        if islands is None or count in islands
    ]


def sizes_given(given: Sequence[str]) -> dict[str, int]:
    """Batch sizes as they are given on the command line.

    >>> sizes_given(["m20=32", "m400=8"])
    {'m20': 32, 'm400': 8}
    """
    sizes = {}
    for text in given:
        name, _, number = text.partition("=")
        if name not in PRESETS or not number.isdecimal() or not 1 <= int(number) <= EXAMPLES:
            raise ConfigError(
                f"--batches {text}: give NAME=SEQUENCES, such as m20=64, with 1 to {EXAMPLES} of them. Names are "
                f"{', '.join(PRESETS)}."
            )
        sizes[name] = int(number)
    return sizes
