"""What islands of one process compute from the very same objects is computed once.

After an exchange all islands hold the same mean, and before it they held the same shared fields. Each then takes the same step, and
on k machines that costs nothing; in one process it would cost k times as much as it has to. An engine that hands several islands
the same objects opens `sharing()` around a round, and `once` then gives the second island what the first one computed. Nowhere else
does it do anything: it calls the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from atoll.core.chunked_elementwise import trees_in
from atoll.core.pytree import trees

R = TypeVar("R")
_Memo = dict[tuple[Any, ...], tuple[tuple[Any, ...], Any]]
_MEMO: ContextVar[_Memo | None] = ContextVar("memo", default=None)


@contextmanager
def sharing() -> Iterator[None]:
    """Inside this context, results are kept for a second call with the same objects."""
    before = _MEMO.set({})
    try:
        yield
    finally:
        _MEMO.reset(before)


def forget() -> None:
    """Drop the results that were kept so far."""
    memo = _MEMO.get()
    if memo is not None:
        memo.clear()


def once(function: Callable[..., R], *arguments: Any) -> R:
    """`function(*arguments)`, or what it gave when it was last called with these very objects. It keeps its arguments, and its
    result is the same for all islands. A call with a donated or borrowed Tree is never kept."""
    memo = _MEMO.get()
    if memo is None or any(tree.donated or tree.borrowed for tree in trees_in(arguments)):
        return function(*arguments)
    key = (function, *map(id, arguments))
    # A result may have been released since, with the island that asked for it.
    if key not in memo or any(tree.deleted for tree in trees(memo[key][1])):
        memo[key] = arguments, function(*arguments)  # with the arguments: an id is of use while its object lives
    result: R = memo[key][1]
    return result
