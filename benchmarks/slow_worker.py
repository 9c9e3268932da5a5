"""One island of slow_link.py in its own process. It reads its spec from standard input and writes one line of JSON.

When its standard input ends, nobody waits for it any more, and it ends too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import torch

from atoll.testing.namespaces import Counters
from slow_atoll import ALGORITHMS, Exchange, Ours
from slow_baselines import TorchDDP, TorchftDiLoCo
from slow_island import Loop, Meeting, Spec, step_alone
from slow_probe import probe

OURS = {f"atoll {name}": name for name in ALGORITHMS}
METHODS = ("torch DDP", "torch DDP + ZeRO", "torchft DiLoCo", *OURS)


def loop_of(method: str, spec: Spec, meeting: Meeting) -> Loop:
    """The way to train of this name."""
    if method in OURS:
        return Ours(OURS[method], spec, meeting)
    if method == "torchft DiLoCo":
        return TorchftDiLoCo(spec, meeting)
    return TorchDDP(spec, sharded=method == "torch DDP + ZeRO")


def measured(spec: Spec, meeting: Meeting) -> dict[str, Any]:
    """Seconds of each step alone, each exchange alone and each round, and what rounds sent, payload alone; turn by turn."""
    line = probe(meeting, spec.transfer_bytes) if spec.transfer_bytes else None
    alone = step_alone(spec)
    exchange = Exchange(spec, meeting) if spec.exchanges else None
    loops = {method: loop_of(method, spec, meeting) for method in spec.methods}
    for do in (alone, exchange or alone, *(loop.round for loop in loops.values())):
        meeting.times(do, 1)  # to warm up
    found: dict[str, Any] = {"line": line, "alone_s": [], "exchange_s": [], "rounds": {method: [] for method in loops}}
    for turn in range(spec.turns + 1):
        found["alone_s"] += meeting.times(alone, spec.alone_steps)
        if exchange is not None:
            found["exchange_s"] += meeting.times(exchange, spec.exchanges)
        if turn < spec.turns:
            for method, loop in loops.items():
                found["rounds"][method].append(_rounds(spec, meeting, loop))
    for loop in loops.values():
        loop.close()
    return found


def _rounds(spec: Spec, meeting: Meeting, loop: Loop) -> dict[str, Any]:
    """Of one method in one turn."""
    meeting.together()
    before = Counters.read(spec.device)
    times_s = meeting.times(loop.round, spec.rounds)
    meeting.together()
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
        meeting = Meeting(spec)
        found = measured(spec, meeting)
        meeting.close()
    except Exception as error:  # whatever others raise at a rate that they cannot bear is what was found
        print(json.dumps({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"}), flush=True)
        os._exit(1)  # threads of those who failed may never end
    print(json.dumps(found), flush=True)
    os._exit(0)  # so may those of a lighthouse


if __name__ == "__main__":
    main()
