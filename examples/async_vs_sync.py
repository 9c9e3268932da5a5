"""Synchronous DiLoCo and asynchronous local SGD on four workers of unequal speed, one of which fails and returns.

The fastest worker is six times as fast as the slowest. In synchronous rounds every worker waits for the slowest; with a hub no
worker waits. Both runs take the same number of local updates. A sink prints how the hub reassigns the failed worker's steps.
"""

from dataclasses import replace

import atoll
from atoll.core.events import Dispatched, Event, IslandJoined, IslandLeft, Returned


class FailurePrinter:
    """An event sink: failures, returns, and which worker continues the unfinished steps."""

    def __init__(self) -> None:
        self.unfinished: Returned | None = None

    def emit(self, event: Event) -> None:
        if isinstance(event, IslandLeft):
            print(f"{event.virtual_time_s:6.1f} s: worker {event.island} fails")
        elif isinstance(event, IslandJoined):
            print(f"{event.virtual_time_s:6.1f} s: worker {event.island} returns and loads the hub's weights")
        elif isinstance(event, Returned):
            print(f"{event.virtual_time_s:6.1f} s: the hub takes back {event.steps} steps on shard {event.shard}")
            self.unfinished = event
        elif isinstance(event, Dispatched) and self.unfinished is not None and event.shard == self.unfinished.shard:
            print(f"{event.virtual_time_s:6.1f} s: worker {event.island} continues shard {event.shard} for {event.steps} steps")
            self.unfinished = None


base = replace(
    atoll.recipes.demo_diloco(),
    model=atoll.GPT(layers=1, width=32, heads=2, head_size=16),
    train=atoll.Train(steps=80, batch_size=8, warm_start_steps=20),
    cluster=atoll.Cluster(islands=4, step_time_s="very"),
)
base = replace(base, data=replace(base.data, limit_bytes=200_000, seq_len=32, eval_batches=4))
outage = atoll.Outage(island=0, start_s=25.0, stop_s=60.0)

synchronous = atoll.run(replace(base, algorithm=atoll.DiLoCo(inner_steps=10, outer=atoll.Nesterov(lr=0.8, momentum=0.7))))
hub = atoll.AsyncLocalSGD(inner_steps=10, outer=atoll.DelayedNesterov(lr=0.8, momentum=0.7, period=4), pace="measured", grace_s=2.0)
run = replace(base, recipe="async-vs-sync", algorithm=hub, cluster=replace(base.cluster, outages=(outage,)))
asynchronous = atoll.run(run, sinks=[FailurePrinter()])

for name, result in (("synchronous", synchronous), ("asynchronous", asynchronous)):
    summary = result.summary
    print(f"{name:12}: loss {result.val_loss:.3f} after {summary.local_updates} updates in {summary.virtual_time_s:.0f} s")
