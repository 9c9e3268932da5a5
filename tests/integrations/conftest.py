"""Two real processes for all trainers, which leave things behind in theirs."""

import pytest

from atoll.testing.processes import processes


@pytest.fixture(scope="session")
def two(_importable):
    with processes(2) as together:
        yield together
