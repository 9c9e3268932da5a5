"""For the twins of the rules that compute in place.

`update` keeps its arguments. Where nobody will read them again, `update_taking` does the same work in their buffers: the weights
and the state that it is handed can no longer be read, the gradient can. It takes a fifth (AdamW) to a half (Nesterov) of the time
and no further memory. Whoever wants to keep weights and state hands it copies, which for AdamW still halves the time.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from atoll.chunks import CHUNK
from atoll.tree import Tree


def take(tree: Tree) -> Tree:
    """The same buffer under a new name, to be written to. `tree` itself can no longer be read."""
    given = tree.give()
    return Tree(given.layout, given.flat)


def check_layouts(*trees: Tree) -> None:
    """Refuse Trees that do not match. It comes before anything is taken, so that nothing is lost."""
    if any(tree.layout != trees[0].layout for tree in trees):
        raise ValueError(f"these Trees have different layouts: {', '.join(map(repr, trees))}. A rule needs those of one model.")


def windows(*trees: Tree) -> Iterator[list[Tensor]]:
    """The buffers side by side, as much of them at a time as stays in cache."""
    numel = trees[0].numel
    size = CHUNK if trees[0].flat.device.type == "cpu" else max(numel, 1)
    for start in range(0, numel, size):
        yield [tree.flat[start : start + size] for tree in trees]
