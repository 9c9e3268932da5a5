"""The shortest run: four unequal islands on slow links train a small decoder with DiLoCo, in the simulator.

It is the demo recipe with fewer steps, so that it takes seconds. `atoll.run(atoll.recipes.demo_diloco())` runs the whole recipe.
"""

from dataclasses import replace

import atoll

run = atoll.recipes.demo_diloco()
run = replace(run, train=replace(run.train, steps=40, batch_size=2, warm_start_steps=20))
run = replace(run, data=replace(run.data, limit_bytes=500_000, eval_batches=4))

result = atoll.run(run)

print(f"validation loss {result.val_loss:.3f} after {result.summary.tokens:,} tokens on {result.summary.islands} islands")
print(
    f"each island sent {result.summary.sent_bytes_per_island / 1e6:.1f} MB in {result.summary.virtual_time_s:.0f} s of virtual time"
)
print(f"events, checkpoints and the final weights are in {result.folder}")
