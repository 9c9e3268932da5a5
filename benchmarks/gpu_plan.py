"""The plan of the GPU benchmark: shapes of models and batches, numbers of islands, and estimates of their memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from atoll.core.errors import ConfigError
from atoll.models.gpt import GPT

Mode = Literal["apart", "recorded", "stacked", "auto"]
"""How islands compute. apart: one after the other, as a bare loop; recorded: one after the other, each pass a CUDA graph; stacked:
all in one pass, a CUDA graph; auto: the mode that the simulator measures to be fastest. For one island, recorded is a stack of one
row."""
PRESETS = {"m150": GPT.m150(), "m20": GPT.m20(), "m60": GPT.m60(), "m400": GPT.m400()}
"""In the order of measurement."""
BATCH_SIZES = {"m150": 32, "m20": 64, "m60": 64, "m400": 16}
"""Sequences per island with which a batch fills the device."""
VOCAB_SIZE, SEQ_LEN, SMALL_SEQ_LEN = 32_000, 1024, 256
BARE_ROUNDS = {"m20": 3}
"""Rounds of one island in a turn of the bare loop, if more than one: short turns are noisy."""
SMALL_BATCHES = {2: 5, 8: 5, 32: 4}
"""Sequences of batches that do not fill the device, and rounds of one island in a turn of the bare loop."""
EXAMPLES = 1024
"""Distinct sequences on the device."""
MODES: Sequence[Mode] = ("apart", "recorded", "stacked")
"""Modes that a user can name."""
ISLANDS = (1, 4, 8, 64)
"""Of every shape. Cells that do not fit into memory are skipped."""
FEW = 8
"""With more islands than this, rounds have fewer steps and turns."""
LARGE_STACKED, SMALL_CHOSEN = ("m20", 4), (8, 8)
"""The preset and number of islands with stacked and auto although a batch fills the device; and the small batch and number of
islands with auto."""
MANY_STEPS, SMALL_MANY_STEPS = 2, 5
"""Maximum steps of a round with many islands, with large and with small batches. The outer step then has a larger share."""
MANY_TURNS = 2
"""Maximum turns with many islands."""
FLOPS_FORMULA = (
    "6 N + 12 layers heads head_size seq_len / 2 per token; N: parameters with the output head, without the input embedding"
)

_ISLAND_BYTES = 20
"""Per parameter: weights, gradients, two moments, and a delta in flight."""
_SHARED_BYTES = 24
"""Per parameter: initial and global weights, outer momentum, the successors of both, and the mean."""
_STACK_BYTES = 12
"""Per parameter and row of a stack: weights, gradients, and gradients before they are copied."""
_LOGIT_BYTES: Mapping[str, int] = {"plain": 16, "stacked": 4}
"""Per token and vocabulary entry: logits and their gradients in half precision, and without fusion in single precision, too."""
_LAYER_BYTES = 80
"""Per token, layer and unit of width: activations for the backward pass, without fusion."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and one island's batch."""

    name: str
    model: GPT
    batch_size: int
    seq_len: int
    vocab_size: int
    bare_steps: int  # of the bare loop in a turn

    @property
    def params(self) -> int:
        return self.model.num_params(self.vocab_size)

    @property
    def tokens(self) -> int:
        """Per step."""
        return self.batch_size * self.seq_len

    @property
    def flops_per_token(self) -> float:
        """Forward and backward; see `FLOPS_FORMULA`."""
        model = self.model
        multiplied = self.params - (0 if model.tied else self.vocab_size * model.width)
        return 6 * multiplied + 12 * model.layers * model.heads * model.head_size * self.seq_len / 2

    @property
    def key(self) -> str:
        return f"{self.name} {self.batch_size}x{self.seq_len} ({self.params} parameters)"

    @property
    def label(self) -> str:
        return f"{self.name}, {self.batch_size} x {self.seq_len}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """DiLoCo on some islands of a shape, in turn with the bare loop."""

    shape: Shape
    islands: int
    mode: Mode
    inner_steps: int
    turns: int

    @property
    def key(self) -> str:
        return f"{self.shape.key} k={self.islands} {self.mode} H={self.inner_steps} turns={self.turns}x{self.shape.bare_steps}"

    @property
    def tokens(self) -> int:
        """Per round of all islands."""
        return self.islands * self.inner_steps * self.shape.tokens

    @property
    def label(self) -> str:
        return f"k={self.islands}, {self.mode}"

    @property
    def estimated_bytes(self) -> int:
        """An upper bound of the memory: a pass of one island without fusion."""
        shape, model = self.shape, self.shape.model
        held = (_ISLAND_BYTES * self.islands + _SHARED_BYTES) * shape.params
        layers = _LAYER_BYTES * model.layers * model.width
        pass_bytes = shape.tokens * (_LOGIT_BYTES["plain"] * shape.vocab_size + layers)
        if self.mode in ("stacked", "auto"):  # auto tries a stack
            held += _STACK_BYTES * self.islands * shape.params
            # With fusion, layers keep a quarter of their activations.
            fused = self.islands * shape.tokens * (_LOGIT_BYTES["stacked"] * shape.vocab_size + layers // 4)
            pass_bytes = max(pass_bytes, fused)
        return held + pass_bytes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All cells by shape, and the size and duration of the matrix product that measures the device's FLOP/s."""

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
    """The published measurements.

    Args:
        presets: names of models, in the order of measuring.
        batch_sizes: other than `BATCH_SIZES`, by name.
        inner_steps: per round; fewer with many islands.
        turns: per cell; fewer with many islands.
        islands: only these numbers of islands; None: all.
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
        counts = {count: large_modes(name, count) for count in ISLANDS}
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
        counts = {count: small_modes(size, count) for count in ISLANDS}
        small[shape] = cells_of(shape, counts, inner_steps, turns, islands, SMALL_MANY_STEPS)
    return Plan(presets=large, small=small, matrix=8192, product_s=3.0, turns=turns)


def large_modes(name: str, islands: int) -> Sequence[Mode]:
    """Modes for batches that fill the device. One shape is enough to show the gain of a stack."""
    return ("apart", "stacked", "auto") if (name, islands) == LARGE_STACKED else ("apart",)


def small_modes(size: int, islands: int) -> Sequence[Mode]:
    """Modes for batches that do not fill the device: all."""
    if islands == 1:
        return ("apart", "recorded")
    return (*MODES, "auto") if (size, islands) == SMALL_CHOSEN else MODES


def quick_plan(islands: Sequence[int] | None = None) -> Plan:
    """A plan of small sizes."""
    model = GPT(layers=1, width=16, heads=2, head_size=8, tied=False)
    shapes = [
        Shape(name=name, model=model, batch_size=size, seq_len=16, vocab_size=64, bare_steps=2)
        for name, size in (("m150", 4), ("m20", 2))
    ]
    return Plan(
        presets={shapes[0]: cells_of(shapes[0], {1: ["apart"], 4: ["apart", "stacked"], 8: ["apart"]}, 2, 3, islands, 2)},
        small={shapes[1]: cells_of(shapes[1], {1: ["apart", "recorded"], 4: [*MODES, "auto"]}, 2, 3, islands, 2)},
        matrix=128,
        product_s=0.01,
        turns=3,
    )


def cells_of(
    shape: Shape,
    modes: Mapping[int, Sequence[Mode]],
    inner_steps: int,
    turns: int,
    islands: Sequence[int] | None,
    many_steps: int,
) -> list[Cell]:
    """One cell per number of islands and mode. A round of many islands has at most `many_steps`."""
    return [
        Cell(
            shape=shape,
            islands=count,
            mode=mode,
            inner_steps=inner_steps if count <= FEW else min(many_steps, inner_steps),
            turns=turns if count <= FEW else min(MANY_TURNS, turns),
        )
        for count, its_modes in modes.items()
        for mode in its_modes
        if islands is None or count in islands
    ]


_KEY = re.compile(
    r"(?P<name>\w+) (?P<batch_size>\d+)x(?P<seq_len>\d+) \((?P<params>\d+) parameters\) "
    r"k=(?P<islands>\d+) (?P<mode>\w+) H=(?P<inner_steps>\d+) turns=(?P<turns>\d+)x(?P<bare_steps>\d+)"
)


def with_cells_of(plan: Plan, keys: Iterable[str]) -> Plan:
    """The plan, with the cells of a record that it does not have: of other parts, or with other rounds and turns. Skips models that
    are in no plan."""
    whole = plan_of(list(PRESETS), {}, inner_steps=1, turns=1)
    presets = {shape: list(cells) for shape, cells in plan.presets.items()}
    small = {shape: list(cells) for shape, cells in plan.small.items()}
    known = [(presets, [*plan.presets, *whole.presets]), (small, [*plan.small, *whole.small])]
    for match in filter(None, map(_KEY.fullmatch, keys)):
        number = {name: int(text) for name, text in match.groupdict().items() if text.isdecimal()}
        for groups, shapes in known:
            its = (match["name"], number["params"], number["seq_len"])
            alike = [shape for shape in shapes if (shape.name, shape.params, shape.seq_len) == its]
            if alike:
                shape = replace(alike[0], batch_size=number["batch_size"], bare_steps=number["bare_steps"])
                rest = {name: number[name] for name in ("islands", "inner_steps", "turns")}
                cell = Cell(shape=shape, mode=cast(Mode, match["mode"]), **rest)
                if cell not in groups.setdefault(shape, []):
                    groups[shape].append(cell)
    return replace(plan, presets=presets, small=small)


def sizes_given(given: Sequence[str]) -> dict[str, int]:
    """Batch sizes from the command line.

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
