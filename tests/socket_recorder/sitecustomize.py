"""Records which code opened each socket on which this process listens. Python imports it at the start of every process that has its
folder on PYTHONPATH, and appends a line of JSON per socket to the file that ATOLL_RECORDED_SOCKETS names.

Sockets of Python are recorded where they begin to listen. Sockets of torch and torchft are those that a constructor of theirs adds.
"""

import functools
import importlib.util
import json
import os
import socket
import sys
import threading
from pathlib import Path

LOG = os.environ.get("ATOLL_RECORDED_SOCKETS")
COMMAND = Path("/proc/self/cmdline").read_text().replace("\0", " ")
OWN, LOCK = set(), threading.RLock()


def record(kind, addresses):
    frame, frames = sys._getframe(1), []
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("atoll."):
            frames.append(f"{name.removeprefix('atoll.')}:{frame.f_code.co_name}")
        frame = frame.f_back
    line = {"kind": kind, "addresses": sorted(addresses), "frames": frames, "command": COMMAND}
    with open(LOG, "a") as file:
        file.write(json.dumps(line) + "\n")


def record_listen(listen):
    @functools.wraps(listen)
    def recorded(self, *arguments):
        with LOCK:
            listen(self, *arguments)
            if self.family in (socket.AF_INET, socket.AF_INET6):
                address = tuple(self.getsockname()[:2])
                OWN.add(address)
                record("socket", [address])

    return recorded


def record_constructor(kind, construct, listening):
    @functools.wraps(construct)
    def recorded(*arguments, **settings):
        before = listening()
        try:
            return construct(*arguments, **settings)
        finally:
            with LOCK:
                if added := listening() - before - OWN:
                    record(kind, added)

    return recorded


def record_servers(construct, listening):
    """Record what the constructor of a store opens if it is the server. A client listens on nothing, and would be recorded as the
    one that opened a socket which another thread opens meanwhile."""
    recorded = record_constructor("TCPStore", construct, listening)

    @functools.wraps(construct)
    def of_servers(*arguments, **settings):
        is_server = arguments[4] if len(arguments) > 4 else settings.get("is_master", False)
        return (recorded if is_server else construct)(*arguments, **settings)

    return of_servers


def record_torch(listening):
    import torch._C._distributed_c10d as c10d

    c10d.TCPStore.__init__ = record_servers(c10d.TCPStore.__init__, listening)
    group = c10d.ProcessGroupGloo
    group.__init__ = record_constructor(group.__name__, group.__init__, listening)
    group.create_device = staticmethod(record_constructor(group.__name__, group.create_device, listening))
    try:
        from torchft import coordination
    except ImportError:
        return
    for name in ("LighthouseServer", "ManagerServer"):
        setattr(coordination, name, record_constructor(name, getattr(coordination, name), listening))


def main():
    socket.socket.listen = record_listen(socket.socket.listen)
    if "/ray/" in COMMAND or not ("atoll" in COMMAND or "torch.distributed.run" in COMMAND):
        return
    path = Path(__file__).parents[1] / "listening_sockets.py"
    spec = importlib.util.spec_from_file_location("listening_sockets", path)
    found = sys.modules["listening_sockets"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    record_torch(lambda: {(one.address, one.port) for one in found.sockets_of(os.getpid())})


if LOG is not None:
    main()
