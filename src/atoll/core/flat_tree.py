"""Tree: named tensors over one contiguous buffer, with arithmetic.

Weights, gradients and momenta are all Trees, so that a rule reads like its equation and runs in one pass over memory:

>>> import torch
>>> weights = Tree.of({"w": torch.ones(2, 2), "b": torch.zeros(2)})
>>> gradient = Tree.of({"w": torch.full((2, 2), 0.5), "b": torch.ones(2)})
>>> (weights - 0.1 * gradient)["w"][0]
tensor([0.9500, 0.9500])

A Tree is a value: arithmetic returns a new Tree and changes none. A buffer is reused by contract, as in JAX:

- **Donated.** An engine that will not read a Tree again marks it with `donate()`; an update may then compute in its buffer. An
  exchange owns its argument: it calls `claim()`, and a claimed Tree can no longer be read.
- **Borrowed.** A view of memory that has another owner, such as a replica's weights or a slice of a larger Tree. No code computes
  in a borrowed Tree; a consumer that needs a buffer of its own copies it.

>>> mine = weights.claim()               # the same buffer under a new name ...
>>> weights["w"]                         # ... so the old name can no longer be read
Traceback (most recent call last):
atoll.core.errors.TreeDonated: this Tree was donated ...

Methods with a trailing underscore compute in place, as torch's do. They are for code that made the Tree itself. A Tree may hold
pieces of larger tensors: its layout has what is needed to save, join and cut them again.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from atoll.core.errors import TreeDonated
from atoll.core.layout import Layout, difference, dtype_text, joined, shard_range, viewed

Scalar = float | int
_CHUNK = 1 << 16
_DEVICE_CHUNK = 1 << 25
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # to compare bits, by bytes of an element


def trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """A module's trainable parameters, tied ones once, in the order of its Trees: matrices first, so that weight decay, which
    spares biases and norms, is one range of the buffer."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    return dict(sorted(named, key=lambda item: item[1].dim() < 2))


class Tree(Mapping[str, Tensor]):
    """Named tensors over one contiguous buffer. See the top of this file."""

    __slots__ = ("_donated", "_flat", "_norm", "_read", "borrowed", "layout")

    def __init__(self, layout: Layout, flat: Tensor) -> None:
        assert flat.shape == (layout.numel,), (flat.shape, layout.numel)
        assert flat.is_contiguous()
        self.layout = layout
        self.borrowed = False  # whether its memory has another owner, so that no code may compute in it
        self._flat: Tensor | None = flat
        self._donated = False
        self._read: Callable[[Layout], Tensor] | None = None
        self._norm: tuple[float, float] | None = None  # the norm and its square, kept by `measure`

    # ------------------------------------------------------------------------------------------------ making and reading

    @staticmethod
    def of(tensors: Mapping[str, Tensor] | torch.nn.Module) -> Tree:
        """A copy of these tensors, or of a module's trainable parameters."""
        if isinstance(tensors, torch.nn.Module):
            tensors = {name: parameter.detach() for name, parameter in trainable(tensors).items()}
        layout = Layout.of(tensors)
        device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
        flat = empty(layout.numel, layout.dtype, device)
        for name, view in layout.views(flat).items():
            view.copy_(tensors[name])
        return Tree(layout, flat)

    @property
    def flat(self) -> Tensor:
        """The buffer. Only read it: a Tree is a value."""
        if self._flat is None:
            if self._read is not None:
                return self._read(self.layout)
            raise TreeDonated("this Tree was donated and its buffer reused. Read it before it is donated, or donate a copy of it.")
        return self._flat

    @property
    def deleted(self) -> bool:
        """Whether the buffer has another owner now, so that reading raises."""
        return self._flat is None and self._read is None

    @property
    def donated(self) -> bool:
        """Whether its owner has given up reading it, so that an update may compute in its buffer."""
        return self._donated and self._flat is not None

    @property
    def numel(self) -> int:
        return self.layout.numel

    @property
    def nbytes(self) -> int:
        return self.numel * self.flat.element_size()

    def __getitem__(self, name: str) -> Tensor:
        flat, piece = self.flat, self.layout.index[name]
        at = self.layout.offsets[name]
        return viewed(piece, flat[at : at + piece.count])

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.index)

    def __len__(self) -> int:
        return len(self.layout.pieces)

    def __contains__(self, name: object) -> bool:
        return name in self.layout.index

    # A Mapping would compare tensors with ==, which gives tensors. Two Trees are equal if they are one; `equal` compares values.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        if self.deleted:
            return "Tree(donated)"
        return f"Tree({len(self)} tensors, {self.numel} x {dtype_text(self.flat.dtype)}, {self.flat.device})"

    def tensors(self) -> dict[str, Tensor]:
        """Copies in the tensors' own dtypes, sharing no memory with this Tree."""
        views = self.layout.views(self.flat)
        return {p.name: views[p.name].to(p.dtype, copy=True) for p in self.layout.pieces}

    def equal(self, other: Tree) -> bool:
        """Whether both have the same layout and the same values (NaN differs from itself)."""
        return self.layout == other.layout and torch.equal(self.flat, other.flat)

    def same_bits(self, other: Tree) -> bool:
        """Whether both have the same layout and the same bits (a NaN is the same as itself)."""
        if self.layout != other.layout or self.flat.dtype != other.flat.dtype:
            return False
        words = _WORDS[self.flat.element_size()]
        return self.flat is other.flat or torch.equal(self.flat.view(words), other.flat.view(words))

    # ------------------------------------------------------------------------------------------------------- buffer ownership

    def donate(self) -> Tree:
        """A handle on this buffer that an update may compute in; this Tree itself can no longer be read.

        The handle can be read until an update has claimed it. A borrowed Tree stays borrowed.
        """
        if self.borrowed:
            return self
        flat, self._flat = self.flat, None
        return _tree(self.layout, flat, donated=True)

    def claim(self, dtype: torch.dtype | None = None) -> Tree:
        """The same values in a buffer that the caller may overwrite: its own, unless it is borrowed or of another dtype.

        This Tree can no longer be read, unless it is borrowed. Views that were taken of it before change with the buffer.
        """
        if self.borrowed:
            return self.copy(dtype)
        flat = self.flat
        if dtype in (None, flat.dtype):
            self._flat = None
            return _tree(self.layout, flat)
        converted = self.copy(dtype)
        self.release()
        return converted

    def writable(self) -> Tree:
        """The same values in a buffer that the caller may overwrite: its own if it is donated, else a copy."""
        return self.claim() if self._donated else self.copy()

    def borrow(self) -> Tree:
        """Another, borrowed, handle on this buffer."""
        return _tree(self.layout, self.flat, borrowed=True)

    @staticmethod
    def borrowed_from(layout: Layout, read: Callable[[Layout], Tensor]) -> Tree:
        """A borrowed Tree of weights that are not in one buffer. Each read of it, or of a part of it, collects the pieces of that
        layout into a new buffer."""
        tree = _tree(layout, None, borrowed=True)
        tree._read = read
        return tree

    def release(self) -> None:
        """Return the buffer to the pool. The owner guarantees that neither this Tree nor a view of it is read again."""
        flat, self._flat = self.flat, None
        if not self.borrowed:
            _recycle(flat)

    # --------------------------------------------------------------------------------------------------------- arithmetic

    def _combine(self, operation: Callable[..., Tensor], *others: Tree | Scalar, out: Tree | None = None, **options: Any) -> Tree:
        """The result in `out`; else in a buffer that an operand was collected into, or in one from the pool."""
        operands: list[Any] = [self.flat, *map(self._operand, others)]
        if out is not None:
            operation(*operands, **options, out=out.flat)
            out._norm = None
            return out
        collected = [t for tree, t in zip((self, *others), operands, strict=True) if type(tree) is Tree and tree._read is not None]
        place = collected[0] if collected else empty(self.layout.numel, operands[0].dtype, operands[0].device)
        return _tree(self.layout, operation(*operands, **options, out=place))

    def _operand(self, other: Any) -> Any:
        """The buffer of a Tree of the same layout, or a number."""
        if type(other) is not Tree:  # Tree is final, and a Mapping's isinstance is slow
            return other
        if other.layout != self.layout:
            raise ValueError(f"these Trees have different layouts: {difference(self.layout, other.layout)}")
        return other.flat

    def __add__(self, other: Tree | Scalar) -> Tree:
        return self._combine(torch.add, other)

    def __sub__(self, other: Tree | Scalar) -> Tree:
        return self._combine(torch.sub, other)

    def __mul__(self, other: Tree | Scalar) -> Tree:
        return self._combine(torch.mul, other)

    def __truediv__(self, other: Tree | Scalar) -> Tree:
        return self._combine(torch.div, other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Tree:
        return self._combine(torch.neg)

    def add(self, other: Tree, alpha: Scalar, *, out: Tree | None = None) -> Tree:
        """`self + alpha * other`, rounded once, as torch's own optimizers round."""
        return self._combine(torch.add, other, alpha=alpha, out=out)

    def lerp(self, other: Tree, weight: float) -> Tree:
        """`self + weight * (other - self)`."""
        return self._combine(torch.lerp, other, weight)

    def addcmul(self, one: Tree, two: Tree, value: float, *, out: Tree | None = None) -> Tree:
        """`self + value * one * two`."""
        return self._combine(torch.addcmul, one, two, value=value, out=out)

    def addcdiv(self, one: Tree, two: Tree, value: float, *, out: Tree | None = None) -> Tree:
        """`self + value * one / two`."""
        return self._combine(torch.addcdiv, one, two, value=value, out=out)

    def sqrt(self) -> Tree:
        return self._combine(torch.sqrt)

    def add_(self, other: Tree | Scalar, alpha: Scalar = 1) -> Tree:
        return self._combine(torch.add, other, alpha=alpha, out=self)

    def mul_(self, factor: Scalar) -> Tree:
        return self._combine(torch.mul, factor, out=self)

    def div_(self, divisor: Scalar) -> Tree:
        return self._combine(torch.div, divisor, out=self)

    def zeros(self) -> Tree:
        """A Tree of the same layout, all zero."""
        flat = self.flat
        return Tree(self.layout, empty(flat.numel(), flat.dtype, flat.device).zero_())

    def copy(self, dtype: torch.dtype | None = None) -> Tree:
        """A Tree of the same values in a buffer of its own, of this dtype (None: the same)."""
        flat = self.flat
        if self._read is not None and dtype in (None, flat.dtype):
            return Tree(self.layout, flat)
        return Tree(self.layout, empty(flat.numel(), dtype or flat.dtype, flat.device).copy_(flat))

    def cast(self, dtype: torch.dtype) -> Tree:
        """In this dtype; itself if it has it already."""
        return self if self.flat.dtype == dtype else self.copy(dtype)

    def wide(self) -> Tree:
        """In single precision at least: what sums and master weights need."""
        return self.cast(torch.promote_types(self.flat.dtype, torch.float32))

    def to(self, device: torch.device | str) -> Tree:
        """On this device; itself if it is there already."""
        return self if self.flat.device == torch.device(device) else Tree(self.layout, self.flat.to(device))

    # ------------------------------------------------------------------------------------------------------------ figures

    def dot(self, other: Tree) -> float:
        """The inner product, summed in double precision."""
        self._operand(other)
        if self is other and self._norm is not None:
            return self._norm[1]
        if self is other and self.flat.device.type != "cpu":
            return self.norm() ** 2  # one kernel, and no doubles
        if self.flat.device.type == "cpu":
            return _added(_dots(self.flat, other.flat, _CHUNK))
        # On a GPU a chunk costs launches, and its doubles memory. One synchronization.
        dots = _dots(self.flat, other.flat, _DEVICE_CHUNK)
        return float(torch.stack([*dots, torch.zeros((), dtype=torch.float64, device=self.flat.device)]).sum())

    def norm(self) -> float:
        """The Euclidean norm, summed in double precision."""
        if self._norm is not None and self.flat is not None:  # reading a Tree that was donated raises
            return self._norm[0]
        if self.flat.device.type != "cpu":  # one kernel, and no doubles
            return float(torch.linalg.vector_norm(self.flat, dtype=torch.float64))
        return math.sqrt(self.dot(self))

    def rough_norm(self) -> float:
        """The norm to about six digits, in the buffer's own precision: a quarter of the time of `norm`."""
        size = _CHUNK if self.flat.device.type == "cpu" else max(self.numel, 1)
        norms = [float(torch.linalg.vector_norm(part)) for part in torch.split(self.flat, size)]
        norm = math.hypot(*norms)
        return norm if math.isfinite(norm) else self.norm()  # squares may overflow where the norm does not

    def is_finite(self) -> bool:
        # A sum is one pass without a temporary. If it is not finite, a value is not, or the sum itself overflowed.
        return bool(torch.isfinite(self.flat.sum())) or bool(torch.isfinite(self.flat).all())

    def digest(self) -> str:
        """A hash of names, shapes, dtypes and bits, the same on all machines of one byte order."""
        state = hashlib.blake2b(digest_size=16)
        for piece in self.layout.pieces:
            state.update(f"{piece.name}{piece.shape}{piece.dtype}{piece.start}:{piece.count};".encode())
        state.update(self.flat.detach().cpu().view(torch.uint8).numpy().data)
        return state.hexdigest()

    # -------------------------------------------------------------------------------------------------------------- shards

    def slice(self, start: int, stop: int) -> Tree:
        """A borrowed Tree on a range of this buffer."""
        if self._read is not None:
            return Tree.borrowed_from(self.layout.slice(start, stop), self._read)
        return _tree(self.layout.slice(start, stop), self.flat[start:stop], borrowed=True)

    def windows(self, size: int) -> list[Tree]:
        """Consecutive slices of this size; the last may be shorter."""
        flats = torch.split(self.flat, size)
        return [_tree(layout, flat, borrowed=True) for layout, flat in zip(self.layout.windows(size), flats, strict=False)]

    def shard(self, rank: int, size: int) -> Tree:
        """This rank's shard, sharing memory with the whole."""
        return self.slice(*shard_range(self.numel, rank, size))

    def select(self, ranges: Sequence[tuple[int, int]]) -> Tree:
        """The pieces in these ranges of the buffer: borrowed if there is one range, or no buffer, else a donated copy."""
        if len(ranges) == 1:
            return self.slice(*ranges[0])
        if self._read is not None:
            return Tree.borrowed_from(self.layout.select(ranges), self._read)
        return Tree.join([self.slice(start, stop) for start, stop in ranges]).donate()

    def part(self, layout: Layout) -> Tree:
        """The pieces in this layout, as `select` gives them."""
        return self.select([(0, self.numel)] if layout == self.layout else self.layout.ranges(layout))

    def paste_(self, part: Tree) -> Tree:
        """Write the pieces of a part into this buffer."""
        at = 0
        for start, stop in self.layout.ranges(part.layout):
            self.flat[start:stop].copy_(part.flat[at : at + stop - start])
            at += stop - start
        self._norm = None
        return self

    def overlaid(self, part: Tree) -> Tree:
        """The weights with the pieces of a part replaced: the part itself if it has all of them, else a donated Tree, in which the
        next call writes without a copy."""
        return part if part.layout == self.layout else self.writable().paste_(part).donate()

    @staticmethod
    def join(shards: Sequence[Tree]) -> Tree:
        """The whole Tree of these shards, in rank order."""
        return Tree(joined(shard.layout for shard in shards), torch.cat([shard.flat for shard in shards]))


def all_finite(trees: Iterable[Tree]) -> bool:
    """Whether every value of every Tree is finite. The host waits for the device once."""
    return finite_and_set(trees, [])[0]


def finite_and_set(trees: Iterable[Tree], flags: Sequence[Tensor]) -> tuple[bool, list[bool]]:
    """Whether every value of every Tree is finite, and which of these flags are set. The host waits for the device once."""
    trees = list(trees)
    # A GPU computes all norms in one kernel, without a temporary. A norm may overflow though no value does.
    norms = torch._foreach_norm([tree.flat for tree in trees]) if trees else []
    numbers = _read([*norms, *flags])
    finite = all(map(math.isfinite, numbers[: len(trees)])) or all(tree.is_finite() for tree in trees)
    return finite, [number != 0.0 for number in numbers[len(trees) :]]


def measure(trees: Sequence[Tree]) -> bool:
    """Computes the norms of these Trees and keeps them for `norm` and `dot`. The host waits for the device once. Nobody may change
    the values from now on. Returns whether all norms are finite."""
    if all(tree.flat.device.type == "cpu" for tree in trees):
        dots = [_dots(tree.flat, tree.flat, _CHUNK) for tree in trees]
        numbers = iter(_read([dot for each in dots for dot in each]))
        squares = [_added(itertools.islice(numbers, len(each))) for each in dots]
        norms = [math.sqrt(square) for square in squares]
    else:
        norms = _read(torch._foreach_norm([tree.flat for tree in trees], 2, torch.float64))
        squares = [norm**2 for norm in norms]
    for tree, norm, square in zip(trees, norms, squares, strict=True):
        tree._norm = norm, square
    return all(map(math.isfinite, norms))


def _dots(one: Tensor, two: Tensor, size: int) -> list[Tensor]:
    """The inner products of chunks of this size, in double precision. The doubles of a chunk stay in a CPU's cache."""
    if one is two:
        return [torch.dot(part, part) for part in (part.double() for part in torch.split(one, size))]
    pairs = zip(torch.split(one, size), torch.split(two, size), strict=True)
    return [torch.dot(mine.double(), other.double()) for mine, other in pairs]


def _added(numbers: Iterable[float | Tensor]) -> float:
    total = 0.0
    for number in numbers:
        total += float(number)  # not sum(): some versions of Python round it otherwise
    return total


def _read(scalars: Sequence[Tensor]) -> list[float]:
    """The values of these tensors without dimensions. The host waits once, and not for each."""
    if not scalars:
        return []
    devices = {scalar.device: None for scalar in scalars}
    if len(devices) > 1:  # such as a counter of steps on the CPU
        return [float(scalar) for scalar in scalars]
    dtype = torch.float64 if any(scalar.dtype == torch.float64 for scalar in scalars) else torch.float32
    runs = [torch.stack([*run]).to(dtype) for _, run in itertools.groupby(scalars, key=lambda scalar: scalar.dtype)]
    found: list[float] = (torch.cat(runs) if len(runs) > 1 else runs[0]).tolist()
    return found


def products(buffers: Sequence[Tensor]) -> Tensor:
    """The inner products of all pairs, summed in double precision, with one synchronization on a GPU."""
    total = torch.zeros(len(buffers), len(buffers), dtype=torch.float64)
    if not buffers or buffers[0].device.type == "cpu":
        for i, j in itertools.combinations_with_replacement(range(len(buffers)), 2):
            total[i, j] = total[j, i] = _added(_dots(buffers[i], buffers[j], _CHUNK))
        return total
    total = total.to(buffers[0].device)
    for parts in zip(*(torch.split(buffer, max(1, _DEVICE_CHUNK // len(buffers))) for buffer in buffers), strict=True):
        stacked = torch.stack(parts).double()
        total.addmm_(stacked, stacked.T)
    return total.cpu()


def _tree(layout: Layout, flat: Tensor | None, *, donated: bool = False, borrowed: bool = False) -> Tree:
    """A Tree without the constructor's checks."""
    tree = object.__new__(Tree)
    tree.layout, tree._flat, tree._donated, tree.borrowed, tree._read = layout, flat, donated, borrowed, None
    tree._norm = None
    return tree


# ------------------------------------------------------------------------------------------------------------ buffer pool
# A new buffer of several megabytes costs more in page faults than in filling it, so released buffers are reused.

_POOL: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
_POOL_LIMIT = 8  # of one size


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised buffer, from the pool if that has one of this size."""
    try:
        return _POOL[numel, dtype, device].pop()  # atomic: two threads cannot both get the last one
    except (KeyError, IndexError):
        return torch.empty(numel, dtype=dtype, device=device)


def _recycle(flat: Tensor) -> None:
    if flat.untyped_storage().nbytes() != flat.nbytes:  # a slice: the rest of the buffer has another owner
        return
    pooled = _POOL.setdefault((flat.numel(), flat.dtype, flat.device), [])
    if len(pooled) < _POOL_LIMIT and all(flat.data_ptr() != other.data_ptr() for other in pooled):
        pooled.append(flat)


def free_buffer_pool() -> None:
    """Free all released buffers. An engine calls it at its end."""
    _POOL.clear()
