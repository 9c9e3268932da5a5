"""How many islands can ACCO hide the exchange on? ZeRO-1 and ACCO, seconds per update in virtual time.

With c seconds of computation and m seconds per exchange an update takes c + m with ZeRO-1 and max(c, 2m) with ACCO, which computes
one half of the batch while it exchanges the other half. More islands make a longer ring: from some number on 2m exceeds c, and
from some larger number on ZeRO-1 is faster.

Only the time matters here, so `simulate` runs the algorithms on a linear model of a few weights, without text and without a folder.
"""

import math

import atoll
from atoll.core.events import RoundFinished
from atoll.testing.simulated_runs import simulate

BATCH_S = 0.5
link = atoll.Link(latency_s=0.010, bandwidth_mbit_per_s=math.inf)  # for a small model latency dominates


def update_s(algorithm: atoll.ZeRO1 | atoll.ACCO, islands: int) -> float:
    """Virtual seconds of the last update."""
    cluster = atoll.Cluster(islands=islands, step_time_s=(BATCH_S,), link=link)
    ends = [event.virtual_time_s for event in simulate(algorithm, steps=4, cluster=cluster).of(RoundFinished)]
    return ends[-1] - ends[-2]


print(f"a batch takes {BATCH_S} s, a message {link.latency_s * 1000:.0f} ms")
print("islands  exchange   ZeRO-1     ACCO")
for islands in (2, 4, 8, 16, 32, 48):
    zero1, acco = update_s(atoll.ZeRO1(), islands), update_s(atoll.ACCO(), islands)
    remark = "all hidden" if acco <= BATCH_S + 1e-9 else "some hidden" if acco < zero1 else "ZeRO-1 is faster"
    print(f"{islands:7} {zero1 - BATCH_S:7.2f} s {zero1:6.2f} s {acco:6.2f} s   {remark}")
