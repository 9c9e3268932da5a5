"""Machines on which tests type command lines: network namespaces with folders, host names and /etc/hosts of their own."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import atoll
from atoll.core.library_logs import QUIET

PATIENCE_S = 180.0
SHORT_RUN = ("train.steps=40", "train.warm_start_steps=0", "algorithm.inner_steps=10", "train.batch_size=2", "train.device=cpu")
"""Settings with which demo-diloco takes seconds."""
ENTER = 'mount --bind "$1" /etc/hosts && echo "$2" > /proc/sys/kernel/hostname && shift 2 && exec "$@"'


class Machine:
    """Runs command lines in one namespace and folder. With a name, it has this host name and the given lines of /etc/hosts."""

    def __init__(self, namespace, folder, name=None, hosts=()):
        self.namespace, self.folder = namespace, folder
        bin_ = folder / "bin"
        bin_.mkdir(parents=True)
        for command, module in {"atoll": "-m atoll", "torchrun": "-m torch.distributed.run", "python": ""}.items():
            (bin_ / command).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
            (bin_ / command).chmod(0o755)
        source = str(Path(atoll.__file__).parents[1])
        variables = {
            "PATH": f"{bin_}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": source,
            "OMP_NUM_THREADS": "1",
        }
        inherited = {name: value for name, value in os.environ.items() if name not in QUIET}  # which a command in this process sets
        self.environment = {**inherited, **variables}
        self._enter = []
        if name is not None:
            (folder / "hosts").write_text("".join(f"{line}\n" for line in ("127.0.0.1 localhost", *hosts)))
            # `ip netns exec` has made a mount namespace, so other processes keep their /etc/hosts.
            self._enter = ["unshare", "--uts", "sh", "-c", ENTER, "sh", str(folder / "hosts"), name]

    def inside(self, line):
        return self.namespace.inside([*self._enter, "sh", "-c", line])

    @contextmanager
    def started(self, line, log):
        """A process that types this line."""
        with open(self.folder / log, "w") as output:
            process = subprocess.Popen(
                self.inside(f"exec {line}"),
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        process.log = self.folder / log
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def typed(self, line, code=0):
        """What a command prints that ends with this exit code."""
        how = {"cwd": self.folder, "env": self.environment, "timeout": PATIENCE_S}
        done = subprocess.run(self.inside(line), capture_output=True, text=True, check=False, **how)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def listening(self):
        """The ports beyond loopback that any process of this machine listens on."""
        rows = [line.split() for line in self.typed("cat /proc/net/tcp /proc/net/tcp6").splitlines()]
        ends = [row[1].split(":") for row in rows if row[3] == "0A"]
        # The kernel prints words of an address as little-endian numbers: loopback ends in 7F, and ::1 in 01000000.
        return {int(port, 16) for host, port in ends if not host.endswith("7F") and host != "0" * 24 + "01000000"}


def until_said(process, text):
    """Waits until a process that a machine started has said this; returns all that it said."""
    deadline_s = time.monotonic() + PATIENCE_S
    while text not in (said := process.log.read_text()):
        assert process.poll() is None, f"it ended before it said {text!r}: {said}"
        assert time.monotonic() < deadline_s, f"it never said {text!r}: {said}"
        time.sleep(0.05)
    return said


def library_lines(text):
    """What libraries themselves have written: log lines of torchft and of torch, and stack traces of C++."""
    return re.findall(r"^.*(?:torchft::|\w\.cpp:\d|frame #\d).*$", text, flags=re.MULTILINE)


def with_settings(line, settings):
    """The command line with more settings, for a run of seconds."""
    return f"{line} {' '.join(f'--set {shlex.quote(one)}' for one in settings)}"
