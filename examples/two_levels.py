"""When do two levels pay on your lines? Four machines of two devices each, fast lines inside, other lines between the machines.

ZeRO-1 agrees on every gradient, at its best: what happens inside a machine costs nothing, so that a machine is one device with the
batches of two. DiLoCo takes all eight devices for islands. Two levels have ZeRO-1 inside machines and DiLoCo between them: where
they are no faster than DiLoCo, they still have half as many islands, which drift apart less, and sharded optimizers. What that
does for the loss is in docs/two_levels.md. Set STEP_S, the model and the lines to your own.
"""

from dataclasses import replace
from tempfile import TemporaryDirectory

import atoll
from atoll.engines.driver import Cache

STEP_S, STEPS = 0.1, 10  # a device's time for its batch; inner steps between two agreements of machines
lines = {
    "one room": atoll.Link(latency_s=0.0001, bandwidth_mbit_per_s=10_000),
    "one building": atoll.Link(latency_s=0.001, bandwidth_mbit_per_s=1000),
    "one city": atoll.Link(latency_s=0.010, bandwidth_mbit_per_s=100),
    "two continents": atoll.Link(latency_s=0.080, bandwidth_mbit_per_s=20),
}
base = atoll.recipes.demo_diloco()
base = replace(
    base,
    model=atoll.GPT(layers=1, width=32, heads=2, head_size=16),
    optimizer=atoll.AdamW(lr=1e-3),
    data=replace(base.data, limit_bytes=200_000, seq_len=16, eval_batches=1),
    keep=atoll.Keep(evaluate_every=STEPS, save_every=STEPS),
)
cache = Cache()  # text and first weights are made once for all runs


def step_s(line: atoll.Link, algorithm: atoll.ZeRO1 | atoll.DiLoCo, islands: int, batch: int, devices: int = 1) -> float:
    """Virtual seconds per step."""
    cluster = atoll.Cluster(islands=islands, devices_per_island=devices, step_time_s=(STEP_S,), link=line)
    inside = atoll.ZeRO1() if devices > 1 else None
    train = atoll.Train(steps=STEPS, batch_size=batch)
    run = replace(base, algorithm=algorithm, inside=inside, cluster=cluster, train=train)
    with TemporaryDirectory() as folder:
        return (atoll.run(run, out=f"{folder}/run", cache=cache).summary.virtual_time_s or 0.0) / STEPS


print(f"a step takes {STEP_S} s of computing; seconds per step")
print("                  ZeRO-1   DiLoCo   two levels")
for place, line in lines.items():
    zero1 = step_s(line, atoll.ZeRO1(), islands=4, batch=2)
    diloco = step_s(line, atoll.DiLoCo(inner_steps=STEPS), islands=8, batch=1)
    both = step_s(line, atoll.DiLoCo(inner_steps=STEPS), islands=4, batch=1, devices=2)
    remark = "ZeRO-1 alone will do" if zero1 < 1.05 * both else f"two levels are {zero1 / both:.1f} times as fast as ZeRO-1"
    print(f"{place:15} {zero1:8.3f} {diloco:8.3f} {both:12.3f}   {remark}")
