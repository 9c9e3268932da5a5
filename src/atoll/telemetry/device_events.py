"""Runs of two levels: events of islands whose devices have an algorithm of their own, seen device by device.

Device j of island i has the number i * devices + j. What an island did as a whole, each of its devices did; its bytes are the first
one's, so that sums stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from atoll.core.events import CaughtUp, Computed, Event, Exchanged, IslandJoined, IslandLeft, RunStarted, UpdateSkipped


def by_device(events: Iterable[Event]) -> Iterator[Event]:
    """The events as if every device were an island. Those of other runs stay as they are."""
    count: int | None = None
    for event in events:
        if isinstance(event, RunStarted):
            count = event.devices_per_island
        if count is None:
            yield event
        else:
            yield from _spread(event, count)


def _spread(event: Event, count: int) -> Iterator[Event]:
    match event:
        case Computed() if event.device is not None:
            yield replace(event, island=event.island * count + event.device)
        case Exchanged() | UpdateSkipped() if event.inside is not None:
            yield replace(event, islands=[event.inside * count + device for device in event.islands])
        case Exchanged():
            yield _for_all(event, count)
        case CaughtUp() | IslandJoined():
            donor = None if event.donor is None else event.donor * count
            for device in range(count):
                sent_bytes = 0 if device else event.sent_bytes
                yield replace(event, island=event.island * count + device, donor=donor, sent_bytes=sent_bytes)
        case IslandLeft():
            for device in range(count):
                yield replace(event, island=event.island * count + device)
        case _:
            yield event


def _for_all(event: Exchanged, count: int) -> Exchanged:
    """An exchange of islands, in which all devices of each took part."""
    ranks = range(len(event.islands))
    return replace(
        event,
        islands=[island * count + device for island in event.islands for device in range(count)],
        heard=[event.heard[rank] for rank in ranks for _ in range(count)],
        arrived_s=[event.arrived_s[rank] for rank in ranks for _ in range(count)],
        sent_bytes=[0 if device else event.sent_bytes[rank] for rank in ranks for device in range(count)],
        control_bytes=[0 if device else event.control_bytes[rank] for rank in ranks for device in range(count)],
    )


def device_name(number: int, devices_per_island: int | None) -> str:
    """
    >>> device_name(5, 2), device_name(5, None)
    ('2.1', '5')
    """
    return str(number) if devices_per_island is None else f"{number // devices_per_island}.{number % devices_per_island}"
