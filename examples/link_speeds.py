"""DDP and DiLoCo with the same work on links of different bandwidth, in virtual time.

The simulator trains the model for real and computes the time: a link of 1 Mbit/s takes no longer to simulate than one of 100.
"""

from dataclasses import replace
from tempfile import TemporaryDirectory

import atoll
from atoll.engines.warm_start_training import Cache

STEPS = 10
model = atoll.GPT(layers=1, width=64, heads=2, head_size=32)
cache = Cache()  # all runs share the tokenized text and the initial weights


def virtual_time_s(algorithm: atoll.DDP | atoll.DiLoCo, mbit_per_s: float) -> float:
    """Virtual seconds that the simulated cluster needs for STEPS steps."""
    base = atoll.recipes.demo_diloco()
    run = replace(
        base,
        model=model,
        data=replace(base.data, limit_bytes=200_000, eval_batches=1),
        algorithm=algorithm,
        optimizer=atoll.AdamW(lr=1e-3),
        train=replace(base.train, steps=STEPS, batch_size=1, warm_start_steps=0),
        cluster=atoll.Cluster(islands=4, step_time_s=(0.1,), link=atoll.Link(latency_s=0.030, bandwidth_mbit_per_s=mbit_per_s)),
        keep=atoll.Keep(evaluate_every=STEPS, save_every=STEPS),
    )
    with TemporaryDirectory() as folder:
        return atoll.run(run, out=f"{folder}/run", cache=cache).summary.virtual_time_s or 0.0


print(f"{STEPS} steps of 0.1 s: computation alone takes {STEPS * 0.1:.1f} s")
print("Mbit/s      DDP   DiLoCo")
for mbit_per_s in (1, 10, 100):
    ddp = virtual_time_s(atoll.DDP(), mbit_per_s)
    diloco = virtual_time_s(atoll.DiLoCo(inner_steps=STEPS), mbit_per_s)
    print(f"{mbit_per_s:6} {ddp:6.1f} s {diloco:6.1f} s")
