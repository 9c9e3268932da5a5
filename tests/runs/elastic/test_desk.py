"""The desk of one island, driven by hand: what is written, judged and saved, whoever was frozen or killed over it."""

from types import SimpleNamespace

from atoll.runs.checkpoint import Checkpoints
from atoll.runs.elastic.sources import Sources


class Fetching(Sources):
    """Of an island whom another gives the state."""

    def _fetched(self, engine, at_least, failed=bool):
        return "round 6, fetched from b"


def test_a_checkpoint_that_cannot_be_read_harms_nobody_as_long_as_another_island_has_the_state(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(5, {})
    (tmp_path / "00000005" / "meta.json").unlink()
    roll = SimpleNamespace(look=lambda: None)
    sources = Fetching("a", roll, None, SimpleNamespace(checkpoints=checkpoints), None, {}, lambda text: None)
    assert sources.first(SimpleNamespace()) == "round 6, fetched from b"
