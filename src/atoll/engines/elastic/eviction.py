"""Who leaves when islands find each other again and again, and cannot do anything together.

A line between two of them that is cut, that lets through one way only, or that changes bits would stop all of them for ever: the
lighthouse knows nothing of it, and sends the same islands to the next meeting. So each tells whom it could not do with, and whoever
has most such lines leaves by itself. Nobody has to shut it out; the others meet without it as soon as it is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from atoll.engines.elastic.membership import Member
from atoll.engines.elastic.snapshot_server import ask


def call(members: Sequence[Member], limit_s: float) -> dict[str, dict[str, Any]]:
    """What each of these says of itself, by name. Whoever does not answer within the limit is not in it."""
    if not members:
        return {}
    with ThreadPoolExecutor(len(members)) as pool:
        said = pool.map(partial(ask, limit_s=limit_s), [member.pier for member in members])
        answers = zip(members, said, strict=True)
        # Another process may have got the port of one that is dead.
        return {member.name: one for member, one in answers if one is not None and one.get("name") == member.name}


def who_leaves(members: Sequence[Member], blames: Mapping[str, Collection[str]]) -> Member:
    """The one with most bad lines. A line is bad if either end says so.

    Of equals one leaves that does not have the run's folder, so that what is done is written down and saved; of these the one that
    came last, since the others did without it.

    Args:
        members: who meets.
        blames: whom each of them could not do with, as far as is known.

    >>> a, b, c = Member("a", "", True, 1.0), Member("b", "", False, 2.0), Member("c", "", False, 3.0)
    >>> who_leaves([a, b, c], {"a": ["b"], "c": ["b"]}).name  # which nobody can reach
    'b'
    >>> who_leaves([a, b, c], {"a": ["b", "c"]}).name  # which can reach nobody
    'a'
    >>> who_leaves([a, b], {"a": ["b"], "b": ["a"]}).name
    'b'
    """
    names = {member.name for member in members}
    lines = {frozenset((one, other)) for one, others in blames.items() for other in others if {one, other} <= names}
    return max(members, key=lambda m: (sum(m.name in line for line in lines), not m.home, m.came_s, m.name))


def double(members: Sequence[Member]) -> Member | None:
    """One that came later than another of the same name; none if all names differ.

    >>> a, b, c = Member("a", "x:1", True, 1.0), Member("b", "x:2", True, 1.0), Member("a", "x:3", True, 2.0)
    >>> double([a, b]), double([b, a, c]) is c
    (None, True)
    """
    by_age = sorted(members, key=lambda member: (member.came_s, member.pier))
    names = [member.name for member in by_age]
    return next((member for at, member in enumerate(by_age) if member.name in names[:at]), None)
