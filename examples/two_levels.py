"""ZeRO-1, DiLoCo and both combined on four machines of two devices, with different links between the machines.

- ZeRO-1 exchanges every gradient. Its links inside a machine cost nothing here: a machine is one device with twice the batch.
- DiLoCo makes an island of each of the eight devices.
- Two levels run ZeRO-1 inside a machine and DiLoCo between machines: half as many islands, and a sharded optimizer per machine.

docs/two_levels.md measures the loss. Set STEP_S, the model and the links to your own.
"""

from dataclasses import replace
from tempfile import TemporaryDirectory

import atoll
from atoll.engines.warm_start_training import Cache

STEP_S, STEPS = 0.1, 10  # seconds that a device computes on its batch; inner steps per DiLoCo round
links = {
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
cache = Cache()  # all runs share the tokenized text and the initial weights


def step_s(link: atoll.Link, algorithm: atoll.ZeRO1 | atoll.DiLoCo, islands: int, batch: int, devices: int = 1) -> float:
    """Virtual seconds per step."""
    cluster = atoll.Cluster(islands=islands, devices_per_island=devices, step_time_s=(STEP_S,), link=link)
    inside = atoll.ZeRO1() if devices > 1 else None
    train = atoll.Train(steps=STEPS, batch_size=batch)
    run = replace(base, algorithm=algorithm, inside=inside, cluster=cluster, train=train)
    with TemporaryDirectory() as folder:
        return (atoll.run(run, out=f"{folder}/run", cache=cache).summary.virtual_time_s or 0.0) / STEPS


print(f"seconds per step, of which computation takes {STEP_S} s")
print("                  ZeRO-1   DiLoCo   two levels")
for name, link in links.items():
    zero1 = step_s(link, atoll.ZeRO1(), islands=4, batch=2)
    diloco = step_s(link, atoll.DiLoCo(inner_steps=STEPS), islands=8, batch=1)
    both = step_s(link, atoll.DiLoCo(inner_steps=STEPS), islands=4, batch=1, devices=2)
    remark = "ZeRO-1 alone is enough" if zero1 < 1.05 * both else f"two levels are {zero1 / both:.1f} times as fast as ZeRO-1"
    print(f"{name:15} {zero1:8.3f} {diloco:8.3f} {both:12.3f}   {remark}")
