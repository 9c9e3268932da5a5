"""Unequal machines, one of which dies and comes back: in step everybody waits for the slowest, with a hub nobody does.

The same model on the same four workers, of which the fastest is six times as fast as the slowest, with as many local updates. A
sink tells of the worker that dies in mid-round: what it was doing is given to somebody else.
"""

from dataclasses import replace

import atoll
from atoll.core.events import Dispatched, Event, IslandJoined, IslandLeft, Returned


class Harbour:
    """Takes events, and tells of who goes, what it leaves behind, and who takes that on."""

    def __init__(self) -> None:
        self.left_behind: Returned | None = None

    def emit(self, event: Event) -> None:
        if isinstance(event, IslandLeft):
            print(f"{event.virtual_time_s:6.1f} s: worker {event.island} dies")
        elif isinstance(event, IslandJoined):
            print(f"{event.virtual_time_s:6.1f} s: worker {event.island} is back, with the hub's weights")
        elif isinstance(event, Returned):
            print(f"{event.virtual_time_s:6.1f} s: its {event.steps} steps on shard {event.shard} are put back")
            self.left_behind = event
        elif isinstance(event, Dispatched) and self.left_behind is not None and event.shard == self.left_behind.shard:
            print(f"{event.virtual_time_s:6.1f} s: worker {event.island} goes on with shard {event.shard}, for {event.steps} steps")
            self.left_behind = None


base = replace(
    atoll.recipes.demo_diloco(),
    model=atoll.GPT(layers=1, width=32, heads=2, head_size=16),
    train=atoll.Train(steps=80, batch_size=8, warm_start_steps=20),
    cluster=atoll.Cluster(islands=4, step_time_s="very"),
)
base = replace(base, data=replace(base.data, limit_bytes=200_000, seq_len=32, eval_batches=4))
outage = atoll.Outage(island=0, start_s=25.0, stop_s=60.0)

in_step = atoll.run(replace(base, algorithm=atoll.DiLoCo(inner_steps=10, outer=atoll.Nesterov(lr=0.8, momentum=0.7))))
hub = atoll.AsyncLocalSGD(inner_steps=10, outer=atoll.DelayedNesterov(lr=0.8, momentum=0.7, period=4), pace="measured", grace_s=2.0)
run = replace(base, recipe="nobody-waits", algorithm=hub, cluster=replace(base.cluster, outages=(outage,)))
nobody_waits = atoll.run(run, sinks=[Harbour()])

for name, result in (("in step", in_step), ("with a hub", nobody_waits)):
    summary = result.summary
    print(f"{name:10}: loss {result.val_loss:.3f} after {summary.local_updates} updates in {summary.virtual_time_s:.0f} s")
