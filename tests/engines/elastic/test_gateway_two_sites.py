"""The page "Two sites over the internet", typed literally in network namespaces: a public machine, and a site behind NAT."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from atoll.core.events import Attended, Leased
from atoll.telemetry.event_log import read_events
from atoll.testing import namespaces

PAGE = Path(__file__).parents[3] / "docs" / "two_sites.md"
PATIENCE_S = 120.0
SMALL = (
    "model.hidden=8",
    "data.examples=512",
    "data.dimensions=16",
    "data.clusters_per_class=1",
    "data.eval_examples=128",
    "algorithm.inner_steps=2",
    "train.steps=20000",
    "train.warm_start_steps=0",
    "train.batch_size=8",
    "cluster.step_time_s=[1.0]",
    "engine.step_delay=0.1",
    "keep.evaluate_every=10000",
)


def unavailable():
    missing = [tool for tool in ("nft", "sysctl") if namespaces._found(tool) is None]
    return namespaces.unavailable_reason() or (
        f"{', '.join(missing)} cannot be found: install nftables and procps" if missing else None
    )


UNAVAILABLE = unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))]


def page_commands():
    """The first three commands of the page: run, invite, join."""
    blocks = re.findall(r"```sh\n(.*?)\n```", PAGE.read_text(), flags=re.DOTALL)
    return blocks[:3]


class Machine:
    """Runs command lines of the page in one namespace and folder."""

    def __init__(self, namespace, folder):
        self.namespace, self.folder = namespace, folder
        bin_ = folder / "bin"
        bin_.mkdir(parents=True)
        (bin_ / "atoll").write_text(f'#!/bin/sh\nexec {sys.executable} -m atoll "$@"\n')
        (bin_ / "atoll").chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}"}

    @contextmanager
    def started(self, line, log):
        """A process that types this line."""
        with open(self.folder / log, "w") as output:
            process = subprocess.Popen(
                self.namespace.inside(["sh", "-c", f"exec {line}"]),
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.wait()

    def typed(self, line, code=0):
        """What a command prints that ends with this exit code."""
        inside = self.namespace.inside(["sh", "-c", line])
        done = subprocess.run(inside, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    def listening(self):
        """The ports beyond loopback that any process of this machine listens on."""
        rows = [line.split() for line in self.typed("cat /proc/net/tcp /proc/net/tcp6").splitlines()]
        ends = [row[1].split(":") for row in rows if row[3] == "0A"]
        # The kernel prints words of an address as little-endian numbers: loopback ends in 7F, and ::1 in 01000000.
        return {int(port, 16) for host, port in ends if not host.endswith("7F") and host != "0" * 24 + "01000000"}


def events(folder, kind):
    log = folder / "events.jsonl"
    return [event for event in read_events(log) if isinstance(event, kind)] if log.exists() else []


def until(condition, what, process, *logs):
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        told = [path.read_text()[-3000:] for path in logs if path.exists()]
        assert process.poll() is None, f"it ended before there was {what}: {told}"
        assert time.monotonic() < deadline_s, f"there was never {what}: {told}"
        time.sleep(0.05)


def rendezvous_of(folder):
    """The process of the gateway."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if words[1:4] == ["-m", "atoll", "rendezvous"] and Path(os.readlink(path.parent / "cwd")) == folder.parent:
                return int(path.parent.name)
    raise AssertionError("there is no rendezvous")


def participating(folder):
    found = events(folder, Attended)
    return found[-1].participating if found else 0


def test_a_site_behind_nat_joins_by_dialling_out_is_killed_and_rejoins(tmp_path):
    run, invite, join = page_commands()
    small = " ".join(f"--set '{setting}'" for setting in SMALL)
    with namespaces.site_behind_nat() as (public, behind):
        here, there = Machine(public, tmp_path / "here"), Machine(behind, tmp_path / "there")
        folder = here.folder / "run"
        logs = [here.folder / "run.log", *(folder / "logs" / f"{name}.log" for name in ("island-0000", "lighthouse"))]
        with here.started(f"{run} {small}", "run.log") as process:
            until(lambda: participating(folder) == 2, "a commit of two islands", process, *logs)
            here.typed(invite)
            assert here.listening() == {29400}, "one open port"
            content = (here.folder / "site-b.json").read_bytes()
            (there.folder / "site-b.json").write_bytes(content)
            assert "chmod 600" in there.typed(join, code=2)
            (there.folder / "site-b.json").chmod(0o600)
            with there.started(join, "join.log") as joiner:
                until(
                    lambda: participating(folder) == 3,
                    "a commit with the site behind NAT",
                    process,
                    there.folder / "join.log",
                    *logs,
                )
                assert not there.listening(), "no open port behind NAT"
                os.kill(rendezvous_of(folder), signal.SIGKILL)
                seen = len(events(folder, Attended))
                again = lambda: any(one.participating == 3 for one in events(folder, Attended)[seen + 3 :])  # noqa: E731
                until(again, "a commit of three after the gateway was killed", process, there.folder / "join.log", *logs)
                os.killpg(joiner.pid, signal.SIGKILL)
                until(lambda: participating(folder) == 2, "a commit without it", process, *logs)
            with there.started(join, "again.log") as joiner:
                until(lambda: participating(folder) == 3, "a commit with it again", process, there.folder / "again.log", *logs)
                identity = json.loads(content)["credentials"]["identity"]
                here.typed(f"atoll invite run --revoke {identity}")
                assert joiner.wait(PATIENCE_S) == 2
                assert f"the join file {identity} was revoked" in (there.folder / "again.log").read_text()
                until(lambda: participating(folder) == 2, "a commit without the revoked one", process, *logs)
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 130, logs[0].read_text()
    units = Counter(tuple(unit[1:]) for event in events(folder, Leased) for unit in event.delivered)
    assert set(units.values()) == {1}, "every unit of data is in exactly one commit"
    digests = [
        set(re.findall(r"committed (round \d+ of epoch \d+ as \w+)", path.read_text()))
        for path in (logs[1], there.folder / "join.log")
    ]
    assert digests[1], "the site behind NAT committed"
    assert digests[1] <= digests[0], "with the same bits"
