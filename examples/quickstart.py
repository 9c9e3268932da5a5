"""The ten-line start: four unequal islands on slow lines train a small decoder with DiLoCo.

The recipe is the demo's, cut short so that it takes seconds. `atoll.run(atoll.recipes.demo_diloco())` is the whole of it.
"""

from dataclasses import replace

import atoll

run = atoll.recipes.demo_diloco()
run = replace(run, train=replace(run.train, steps=40, batch_size=2, warm_start_steps=20))
run = replace(run, data=replace(run.data, limit_bytes=500_000, eval_batches=4))

result = atoll.run(run)

print(f"validation loss {result.val_loss:.3f} after {result.summary.tokens:,} tokens on {result.summary.islands} islands")
print(f"each sent {result.summary.sent_bytes_per_island / 1e6:.1f} MB in {result.summary.virtual_time_s:.0f} s of virtual time")
print(f"everything about it is in {result.folder}")
