"""A cell of slow_link.py: both islands, each in its namespace, until both have said what they found or one has failed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atoll.testing.namespaces import NetworkNamespace
from slow_island import Spec

WORKER = Path(__file__).resolve().parent / "slow_worker.py"
GRACE_S = 10.0
"""How long the other island may go on after one has failed."""


def carried_out(islands: Sequence[NetworkNamespace], specs: Sequence[Spec], limit_s: float) -> list[dict[str, Any]]:
    """What each island found; or one error alone, of the island that failed by itself if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{spec.rank}" for spec in specs]
        processes = [_started(island, spec, log) for island, spec, log in zip(islands, specs, logs, strict=True)]
        try:
            _wait(processes, limit_s)
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        results = [_result(process, log, limit_s) for process, log in zip(processes, logs, strict=True)]
    failed = [result for result in results if "error" in result]
    return sorted(failed, key=lambda result: bool(result.get("killed")))[:1] or results


def _started(island: NetworkNamespace, spec: Spec, log: Path) -> subprocess.Popen[str]:
    environment = {"GLOO_SOCKET_IFNAME": island.device, "OMP_NUM_THREADS": "1"}
    process = island.start([sys.executable, str(WORKER)], environment, log)
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(spec)) + "\n")
    process.stdin.flush()
    return process


def _wait(processes: Sequence[subprocess.Popen[str]], limit_s: float) -> None:
    """Until all have ended, or it has been too long; it is too long soon after one has failed."""
    deadline_s, failed = time.monotonic() + limit_s, False
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline_s:
        if not failed and any(process.poll() for process in processes):
            deadline_s, failed = min(deadline_s, time.monotonic() + GRACE_S), True
        time.sleep(0.05)


def _result(process: subprocess.Popen[str], log: Path, limit_s: float) -> dict[str, Any]:
    told = [line for line in log.read_text().splitlines() if line.startswith("{")]
    if told:
        result: dict[str, Any] = json.loads(told[-1])
        return result
    if process.returncode == -9:
        return {"error": f"did not finish within {limit_s:g} s", "killed": True}
    said = log.with_suffix(".err").read_text().strip().splitlines()[-1:] or ["nothing"]
    return {"error": f"ended with code {process.returncode} and said: {said[0][:300]}"}
