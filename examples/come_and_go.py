"""Islands that come and go, and messages that are lost: training goes on with whoever is there.

One island is away for two rounds, one joins half-way, and every fifth message is lost. A sink sees what happens as it happens.
"""

from dataclasses import replace

import atoll
from atoll.core.events import CaughtUp, Event, Exchanged, IslandJoined, IslandLeft
from atoll.runs.cluster import Away


class Harbour:
    """Takes events, and tells of arrivals, departures and silence."""

    def emit(self, event: Event) -> None:
        if isinstance(event, IslandLeft):
            print(f"round {event.round}: island {event.island} leaves")
        elif isinstance(event, IslandJoined):
            print(f"round {event.round}: island {event.island} joins, given {event.sent_bytes:,} bytes by island {event.donor}")
        elif isinstance(event, CaughtUp):
            print(f"round {event.round}: island {event.island} catches up with island {event.donor}")
        elif isinstance(event, Exchanged) and not all(event.heard):
            silent = [island for island, heard in zip(event.islands, event.heard, strict=True) if not heard]
            print(f"round {event.round}: not heard: {silent}; agreed: {sum(event.heard)} of {len(event.heard)}")


base = atoll.recipes.demo_diloco()
run = replace(
    base,
    model=atoll.GPT(layers=1, width=32, heads=2, head_size=16),
    data=replace(base.data, limit_bytes=200_000, seq_len=32, eval_batches=4),
    algorithm=atoll.DiLoCo(inner_steps=5),
    train=replace(base.train, steps=40, batch_size=8, warm_start_steps=20),
    cluster=atoll.Cluster(islands=4, pool=(3, 4), away=(Away(island=1, start=2, stop=4),), drop_probability=0.2),
)
result = atoll.run(run, sinks=[Harbour()])

summary = result.summary
print(f"validation loss {result.val_loss:.3f} after {summary.outer_steps} outer steps in {summary.rounds} rounds")
print(f"the islands took {summary.local_updates} steps; the weights hold {summary.tokens:,} tokens of them")
