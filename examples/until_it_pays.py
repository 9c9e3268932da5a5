"""How many islands until hiding exchanges stops paying? ZeRO-1 and ACCO, an update of each in virtual time.

ACCO computes half a batch while the other half is on its way, so an update takes max(c, 2m) instead of c + m, where computing takes
c and an exchange m. The more islands, the longer the ring: at some number 2m is more than c, and at some number ZeRO-1 is faster.

Only the clock is looked at, so no text is read and no folder written: `simulate` runs an algorithm on a cluster with a linear
model of a few weights. With a model and text it is `atoll.run`, as in the other examples.
"""

import math

import atoll
from atoll.core.events import RoundFinished
from atoll.testing.simulated_runs import simulate

BATCH_S = 0.5
line = atoll.Link(latency_s=0.010, bandwidth_mbit_per_s=math.inf)  # a small model: it is the way that takes time, not the bytes


def update_s(algorithm: atoll.ZeRO1 | atoll.ACCO, islands: int) -> float:
    """Seconds per update, once the beginning is over."""
    cluster = atoll.Cluster(islands=islands, step_time_s=(BATCH_S,), link=line)
    ends = [event.virtual_time_s for event in simulate(algorithm, steps=4, cluster=cluster).of(RoundFinished)]
    return ends[-1] - ends[-2]


print(f"a batch takes {BATCH_S} s, a message {line.latency_s * 1000:.0f} ms")
print("islands  exchange   ZeRO-1     ACCO")
for islands in (2, 4, 8, 16, 32, 48):
    zero1, acco = update_s(atoll.ZeRO1(), islands), update_s(atoll.ACCO(), islands)
    remark = "all hidden" if acco <= BATCH_S + 1e-9 else "some hidden" if acco < zero1 else "ZeRO-1 is faster"
    print(f"{islands:7} {zero1 - BATCH_S:7.2f} s {zero1:6.2f} s {acco:6.2f} s   {remark}")
