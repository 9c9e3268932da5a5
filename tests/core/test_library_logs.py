"""Libraries log problems alone, unless the user has chosen another level."""

import os
import subprocess
import sys

from atoll.core.library_logs import QUIET, quieten


def test_a_level_that_the_user_has_set_stays(monkeypatch):
    for name in QUIET:
        monkeypatch.setenv(name, "info")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    quieten()
    assert (os.environ["RUST_LOG"], os.environ["TORCH_CPP_LOG_LEVEL"]) == ("info", "ERROR")


LOSES_ITS_STORE = """
import subprocess, sys
from torch._C._distributed_c10d import TCPStore

if len(sys.argv) > 1:
    from atoll.core.library_logs import quieten
    quieten()
code = '''
import sys
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
'''
server = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
store = TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False, wait_for_workers=False)
server.communicate()
try:
    store.get("key")
except RuntimeError:
    print("lost")
"""


def test_torch_is_quiet_in_a_script_that_imported_it_before(monkeypatch):
    for name in QUIET:
        monkeypatch.delenv(name, raising=False)

    def said(*arguments):
        done = subprocess.run([sys.executable, "-c", LOSES_ITS_STORE, *arguments], capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    lost, stack = said()
    assert (lost, "frame #0" in stack) == ("lost\n", True), "torch itself prints its C++ stack"
    assert said("quiet") == ("lost\n", "")
