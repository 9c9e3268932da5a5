"""One island of slow_link.py in its own process. It reads its spec from standard input and writes one line of JSON.

It exits when its standard input ends, since then no process waits for its result.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist

from slow_atoll import ALGORITHMS, AtollLoop, Exchange
from slow_baselines import TorchDDP, TorchftDiLoCo
from slow_island import IslandGroup, Loop, Spec, step_alone
from slow_probe import Counters, probe

OURS = {f"atoll {name}": name for name in ALGORITHMS}
BUCKETED = "torch DDP, buckets of 1 MiB"
METHODS = ("torch DDP", BUCKETED, "torch DDP + ZeRO", "torchft DiLoCo", *OURS)


def loop_of(method: str, spec: Spec, group: IslandGroup) -> Loop:
    """The training method of this name."""
    if method in OURS:
        return AtollLoop(OURS[method], spec, group)
    if method == "torchft DiLoCo":
        return TorchftDiLoCo(spec, group)
    return TorchDDP(spec, sharded=method == "torch DDP + ZeRO", bucket_mib=1 if method == BUCKETED else None)


def measured(spec: Spec, group: IslandGroup) -> dict[str, Any]:
    """Seconds of each step alone, each exchange alone and each round, and the payload of rounds, turn by turn."""
    line = probe(group, spec.transfer_bytes) if spec.transfer_bytes else None
    alone = step_alone(spec)
    exchange = Exchange(spec, group) if spec.exchanges else None
    loops = {method: loop_of(method, spec, group) for method in spec.methods}
    for call in (alone, exchange or alone, *(loop.round for loop in loops.values())):
        group.times(call, 1)  # warm-up
    found: dict[str, Any] = {"line": line, "alone_s": [], "exchange_s": [], "rounds": {method: [] for method in loops}}
    for turn in range(spec.turns + 1):
        found["alone_s"] += group.times(alone, spec.alone_steps)
        if exchange is not None:
            found["exchange_s"] += group.times(exchange, spec.exchanges)
        if turn < spec.turns:
            for method, loop in loops.items():
                found["rounds"][method].append(_rounds(spec, group, loop))
    for loop in loops.values():
        loop.close()
    return found


def _rounds(spec: Spec, group: IslandGroup, loop: Loop) -> dict[str, Any]:
    """The rounds of one method in one turn."""
    dist.barrier()
    before = Counters.read(spec.device)
    times_s = group.times(loop.round, spec.rounds)
    dist.barrier()
    return {
        "round_s": times_s,
        "payload_bytes": Counters.read(spec.device).payload_since(before) / spec.rounds,
        "steps": loop.steps_per_round,
        "exchanges": loop.exchanges_per_round,
    }


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    torch.set_num_threads(1)
    spec = Spec(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        group = IslandGroup(spec)
        found = measured(spec, group)
        group.close()
    except Exception as error:  # a method that fails at this rate is a result
        print(json.dumps({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"}), flush=True)
        os._exit(1)  # threads of a failed method may never end
    print(json.dumps(found), flush=True)
    os._exit(0)  # nor may those of a lighthouse


if __name__ == "__main__":
    main()
