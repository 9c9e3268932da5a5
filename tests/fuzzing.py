"""How many inputs each fuzzer tries. docs/security.md has the same figures, and tests/test_security_sockets.py compares them."""

from typing import NamedTuple

from hypothesis import HealthCheck


class Fuzzer(NamedTuple):
    """The inputs of a fuzzer in `make test` and in `make test-slow`."""

    fast: int
    slow: int


FUZZED = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}
"""Settings of hypothesis: a fuzzer tries the same inputs each time."""
FUZZERS = {
    "settings of recipes and engines": Fuzzer(400, 20_000),
    "settings that are carried out": Fuzzer(100, 3_000),
    "commands on damaged files of a finished run": Fuzzer(500, 3_000),
    "resumes of a damaged interrupted run": Fuzzer(80, 500),
    "replays of a damaged asynchronous run": Fuzzer(200, 1_000),
    "readings and resumes of damaged stopped runs on processes, elastic and Ray": Fuzzer(0, 75),
    "readings of damaged secrets, join files and what processes keep for the next ones": Fuzzer(500, 5_000),
    "listener of `atoll doctor`": Fuzzer(0, 300),
    "stores of ranks and of process groups, and the registry's port": Fuzzer(0, 1_500),
    "lighthouse": Fuzzer(0, 350),
    "forwarders": Fuzzer(0, 850),
    "gateway": Fuzzer(60, 2_000),
    "queries to a snapshot server": Fuzzer(200, 5_000),
    "answers of a snapshot server": Fuzzer(200, 5_000),
    "messages of a socket group": Fuzzer(200, 5_000),
    "entries of the registry and the lighthouse": Fuzzer(400, 10_000),
}
"""What a fuzzer tries at least."""
