"""Islands leave and join, and the network drops exchanges: the islands that are present train on.

Island 1 is away in rounds 2 and 3, island 3 joins half-way, and every exchange of an island is lost with probability 0.2. A sink
prints the membership events as the engine emits them.
"""

from dataclasses import replace

import atoll
from atoll.core.events import CaughtUp, Event, Exchanged, IslandJoined, IslandLeft
from atoll.runs.cluster import Away


class MembershipPrinter:
    """An event sink."""

    def emit(self, event: Event) -> None:
        if isinstance(event, IslandLeft):
            print(f"round {event.round}: island {event.island} leaves")
        elif isinstance(event, IslandJoined):
            print(f"round {event.round}: island {event.island} joins with {event.sent_bytes:,} bytes from island {event.donor}")
        elif isinstance(event, CaughtUp):
            print(f"round {event.round}: island {event.island} catches up with island {event.donor}")
        elif isinstance(event, Exchanged) and not all(event.heard):
            missed = [island for island, heard in zip(event.islands, event.heard, strict=True) if not heard]
            print(f"round {event.round}: islands {missed} missed the exchange of {len(event.heard)} islands")


base = atoll.recipes.demo_diloco()
run = replace(
    base,
    model=atoll.GPT(layers=1, width=32, heads=2, head_size=16),
    data=replace(base.data, limit_bytes=200_000, seq_len=32, eval_batches=4),
    algorithm=atoll.DiLoCo(inner_steps=5),
    train=replace(base.train, steps=40, batch_size=8, warm_start_steps=20),
    cluster=atoll.Cluster(islands=4, pool=(3, 4), away=(Away(island=1, start=2, stop=4),), drop_probability=0.2),
)
result = atoll.run(run, sinks=[MembershipPrinter()])

summary = result.summary
print(f"validation loss {result.val_loss:.3f} after {summary.outer_steps} outer steps in {summary.rounds} rounds")
print(f"the islands took {summary.local_updates} steps; {summary.tokens:,} tokens of them reached the weights")
