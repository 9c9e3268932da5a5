"""The plan of the GPU benchmark: shapes of models and batches, numbers of islands, and the memory that they need."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from atoll.core.errors import ConfigError
from atoll.models.gpt import GPT

Way = Literal["apart", "recorded", "stacked", "auto"]
"""Islands one after the other as a bare loop computes; one after the other, each pass recorded and replayed; all in one pass, which
is recorded too; and whichever of these the simulator measures to be fastest. A stack of one row is the recorded form: one island
has no other."""
PRESETS = {"m150": GPT.m150(), "m20": GPT.m20(), "m60": GPT.m60(), "m400": GPT.m400()}
"""In the order in which they are measured: what is asked for most comes first."""
BATCH_SIZES = {"m150": 32, "m20": 64, "m60": 64, "m400": 16}
"""Sequences of an island's batch that fill the device."""
VOCAB_SIZE, SEQ_LEN, SMALL_SEQ_LEN = 32_000, 1024, 256
BARE_ROUNDS = {"m20": 3}
"""Rounds of one island that the bare loop takes in a turn, where that is more than one: a short turn tells little."""
SMALL_BATCHES = {2: 5, 8: 5, 32: 4}
"""Sequences of batches that do not fill it, and rounds of one island in a turn of the bare loop: a step is short."""
EXAMPLES = 1024
"""Different sequences on the device."""
WAYS: Sequence[Way] = ("apart", "recorded", "stacked")
"""That are asked for by name."""
ISLANDS = (1, 4, 8, 64)
"""Of every shape. What does not fit into memory is skipped when its turn comes."""
FEW = 8
"""More islands than this are many: their rounds are long, and have fewer steps and turns."""
LARGE_STACKED, SMALL_CHOSEN = ("m20", 4), (8, 8)
"""The preset and number of islands that are stacked, and left to be chosen, though a batch fills the device; and the small batch
and number of islands that are left to be chosen."""
MANY_STEPS, SMALL_MANY_STEPS = 2, 5
"""Steps of a round of many islands at most, with large and with small batches. What lies between two rounds weighs more in them."""
MANY_TURNS = 2
"""Turns of many islands at most."""
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
        """What it takes at most: as if nothing were fused in a pass of one island."""
        shape, model = self.shape, self.shape.model
        held = (_ISLAND_BYTES * self.islands + _SHARED_BYTES) * shape.params
        layers = _LAYER_BYTES * model.layers * model.width
        pass_bytes = shape.tokens * (_LOGIT_BYTES["plain"] * shape.vocab_size + layers)
        if self.way in ("stacked", "auto"):  # which tries a stack
            held += _STACK_BYTES * self.islands * shape.params
            # Fused: a quarter of what the layers keep otherwise.
            fused = self.islands * shape.tokens * (_LOGIT_BYTES["stacked"] * shape.vocab_size + layers // 4)
            pass_bytes = max(pass_bytes, fused)
        return held + pass_bytes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All cells, by their shape, and how large the matrix product is that tells the device's peak, and how long it is repeated."""

    presets: Mapping[Shape, Sequence[Cell]]
    small: Mapping[Shape, Sequence[Cell]]
    matrix: int
    product_s: float
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
        inner_steps: of a round of few islands; of many at most.
        turns: of each cell, in the same way.
        islands: only with so many; none: with all.
    """
    sizes = {**BATCH_SIZES, **batch_sizes}
    large = {}
    for name in presets:
        shape = Shape(
            name=name,
            model=PRESETS[name],
            batch_size=sizes[name],
            seq_len=SEQ_LEN,
            vocab_size=VOCAB_SIZE,
            bare_steps=BARE_ROUNDS.get(name, 1) * inner_steps,
        )
        counts = {count: large_ways(name, count) for count in ISLANDS}
        large[shape] = cells_of(shape, counts, inner_steps, turns, islands, MANY_STEPS)
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
        counts = {count: small_ways(size, count) for count in ISLANDS}
        small[shape] = cells_of(shape, counts, inner_steps, turns, islands, SMALL_MANY_STEPS)
    return Plan(presets=large, small=small, matrix=8192, product_s=3.0, turns=turns)


def large_ways(name: str, islands: int) -> Sequence[Way]:
    """Of batches that fill the device: one is enough to show what a stack gains there."""
    return ("apart", "stacked", "auto") if (name, islands) == LARGE_STACKED else ("apart",)


def small_ways(size: int, islands: int) -> Sequence[Way]:
    """Of batches that do not fill it: all that there are."""
    if islands == 1:
        return ("apart", "recorded")
    return (*WAYS, "auto") if (size, islands) == SMALL_CHOSEN else WAYS


def quick_plan(islands: Sequence[int] | None = None) -> Plan:
    """The same in miniature."""
    model = GPT(layers=1, width=16, heads=2, head_size=8, tied=False)
    shapes = [
        Shape(name=name, model=model, batch_size=size, seq_len=16, vocab_size=64, bare_steps=2)
        for name, size in (("m150", 4), ("m20", 2))
    ]
    return Plan(
        presets={shapes[0]: cells_of(shapes[0], {1: ["apart"], 4: ["apart", "stacked"], 8: ["apart"]}, 2, 3, islands, 2)},
        small={shapes[1]: cells_of(shapes[1], {1: ["apart", "recorded"], 4: [*WAYS, "auto"]}, 2, 3, islands, 2)},
        matrix=128,
        product_s=0.01,
        turns=3,
    )


def cells_of(
    shape: Shape,
    ways: Mapping[int, Sequence[Way]],
    inner_steps: int,
    turns: int,
    islands: Sequence[int] | None,
    many_steps: int,
) -> list[Cell]:
    """One for each number of islands and its ways; a round of many has `many_steps`, if that is less."""
    return [
        Cell(
            shape=shape,
            islands=count,
            way=way,
            inner_steps=inner_steps if count <= FEW else min(many_steps, inner_steps),
            turns=turns if count <= FEW else min(MANY_TURNS, turns),
        )
        for count, its_ways in ways.items()
        for way in its_ways
        if islands is None or count in islands
    ]


_KEY = re.compile(
    r"(?P<name>\w+) (?P<batch_size>\d+)x(?P<seq_len>\d+) \((?P<params>\d+) parameters\) "
    r"k=(?P<islands>\d+) (?P<way>\w+) H=(?P<inner_steps>\d+) turns=(?P<turns>\d+)x(?P<bare_steps>\d+)"
)


def with_cells_of(plan: Plan, keys: Iterable[str]) -> Plan:
    """The plan, and what a record's keys tell of cells that it does not have: of a part that was not asked for now, or of rounds
    and turns as they were once. A model that is in no plan is left out."""
    whole = plan_of(list(PRESETS), {}, inner_steps=1, turns=1)
    presets = {shape: list(cells) for shape, cells in plan.presets.items()}
    small = {shape: list(cells) for shape, cells in plan.small.items()}
    known = [(presets, [*plan.presets, *whole.presets]), (small, [*plan.small, *whole.small])]
    for told in filter(None, map(_KEY.fullmatch, keys)):
        number = {name: int(text) for name, text in told.groupdict().items() if text.isdecimal()}
        for groups, shapes in known:
            its = (told["name"], number["params"], number["seq_len"])
            alike = [shape for shape in shapes if (shape.name, shape.params, shape.seq_len) == its]
            if alike:
                shape = replace(alike[0], batch_size=number["batch_size"], bare_steps=number["bare_steps"])
                rest = {name: number[name] for name in ("islands", "inner_steps", "turns")}
                cell = Cell(shape=shape, way=cast(Way, told["way"]), **rest)
                if cell not in groups.setdefault(shape, []):
                    groups[shape].append(cell)
    return replace(plan, presets=presets, small=small)


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
