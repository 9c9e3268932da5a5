"""The memory of a process with simulated islands: its peak, and after a round.

    python benchmarks/sim_memory.py 4      DiLoCo on four islands of the 20M decoder, one step; prints one JSON object

`sim_overhead.py` calls it for two numbers of islands. The difference is the cost of further islands.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import AtollError, ConfigError
from atoll.core.flat_tree import Tree
from atoll.engines.simulator.launch import engine_of
from atoll.models.gpt import GPT
from atoll.replica.evaluator import Evaluator
from atoll.runs.run_settings import Run, candidates
from atoll.runs.workloads import sharded_workload
from atoll.telemetry.sinks import Fanout
from atoll.testing.simulated_runs import run_engine
from record import script

MUST_HOLD_BYTES = 16
"""Per parameter of an island: weight, gradient and AdamW's two moments, in single precision."""


def run_of(islands: int, model: GPT, vocab_size: int) -> Run:
    """One step with batches so small that activations take little memory."""
    settings = [
        f"model=GPT(layers={model.layers},width={model.width},heads={model.heads},head_size={model.head_size},tied={model.tied})",
        f"model.vocab_size={vocab_size}",
        "data=Text(corpus=stdlib,tokenizer=bytes,seq_len=8,limit_bytes=100000,eval_batches=1)",
        "algorithm.inner_steps=1",
        "optimizer.lr=0.001",
        "train=Train(steps=1,batch_size=1)",
        f"cluster=Cluster(islands={islands},threads_per_island=1)",
    ]
    return override(recipes.recipe("demo-diloco"), settings, candidates).resolved


def use_memory(run: Run) -> dict[str, int]:
    """Runs without saving. Returns the number of parameters, and this process's memory now and at its peak."""
    workload = sharded_workload(run, run.data.load(), Tree.of({}))
    params = Tree.of(workload.module())
    engine = engine_of(run, workload, params, Evaluator(workload), Fanout([]))
    run_engine(engine)
    return {"islands": run.cluster.islands, "params": params.numel, **process_memory()}


def process_memory() -> dict[str, int]:
    """This process's resident memory, and its peak.

    Raises:
        ConfigError: the system has no /proc.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        raise ConfigError(f"{status} does not exist: memory is measured on Linux only. Skip this part: --only speed --only outer.")
    # Not getrusage, whose peak includes the parent's memory at the fork.
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    return {name: int(lines[key].split()[0]) * 1024 for name, key in (("rss_bytes", "VmRSS"), ("peak_bytes", "VmHWM"))}


def measure(islands: int, *, tiny: bool = False) -> dict[str, int]:
    """The memory of a fresh process with this many islands."""
    command = [sys.executable, str(Path(__file__).resolve()), str(islands), *(["--tiny"] if tiny else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AtollError(f"{' '.join(command)} failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The peak memory of simulated islands of the 20M decoder.")
    parser.add_argument("islands", type=int, help="number of islands")
    parser.add_argument("--tiny", action="store_true", help="a small decoder, for a smoke test")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model, vocab_size = (GPT.tiny(), 257) if options.tiny else (GPT.m20(), 32_000)
    print(json.dumps(use_memory(run_of(options.islands, model, vocab_size))))


if __name__ == "__main__":
    script(main)
