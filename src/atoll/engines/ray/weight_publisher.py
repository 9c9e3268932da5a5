"""Weights in the object store: each version is put there once, for all who are sent off with it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

from atoll.core.flat_tree import Tree
from atoll.engines.ray.messages import Bits, bits_of

_KEPT = 3  # of those that were published last; others are out with workers that have them already


class Publisher:
    """Puts weights into the object store.

    Args:
        put: puts bits there, and gives a reference.
    """

    def __init__(self, put: Callable[[Bits], Any]) -> None:
        self._put = put
        self._published: list[tuple[Tree, Any]] = []
        self._lock = Lock()

    def publish(self, tree: Tree) -> Any:
        """A reference to these weights."""
        with self._lock:
            found = next((reference for other, reference in self._published if other is tree), None)
            if found is None:
                found = self._put(bits_of(tree))
                self._published = [(other, reference) for other, reference in self._published if not other.given][-_KEPT:]
                self._published.append((tree, found))
            return found

    def forget(self, reference: Any) -> None:
        """It is lost: the next who asks for these weights has them put there anew."""
        with self._lock:
            self._published = [(tree, other) for tree, other in self._published if other != reference]
