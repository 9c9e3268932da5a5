"""Memoizes what several islands of one process compute from the same objects.

After an exchange all islands hold the same mean and the same shared fields, and each takes the same step. On k machines they do so
in parallel; in one process it would take k times as long. An engine that gives several islands the same objects opens `sharing()`
around a round, and `once` then returns the first island's result to the others. Outside it, `once` only calls the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from atoll.core.nested_trees import trees, trees_in

R = TypeVar("R")
_Memo = dict[tuple[Any, ...], tuple[tuple[Any, ...], Any]]
_MEMO: ContextVar[_Memo | None] = ContextVar("memo", default=None)


@contextmanager
def sharing() -> Iterator[None]:
    """Inside this context `once` keeps its results."""
    before = _MEMO.set({})
    try:
        yield
    finally:
        _MEMO.reset(before)


def forget() -> None:
    """Drop the kept results."""
    memo = _MEMO.get()
    if memo is not None:
        memo.clear()


def once(function: Callable[..., R], *arguments: Any) -> R:
    """`function(*arguments)`, or its kept result for these very objects. The function must not change its arguments. Results of
    calls with a donated or borrowed Tree are not kept."""
    memo = _MEMO.get()
    if memo is None or any(tree.donated or tree.borrowed for tree in trees_in(arguments)):
        return function(*arguments)
    key = (function, *map(id, arguments))
    # The island that asked first may have released the result.
    if key not in memo or any(tree.deleted for tree in trees(memo[key][1])):
        memo[key] = arguments, function(*arguments)  # with the arguments: an id is valid while its object lives
    result: R = memo[key][1]
    return result
