"""An island's error buffers beside the run's checkpoints, for a run that is stopped, or whose islands all died, and is resumed.

A checkpoint of an elastic run has what all islands share. What a codec left out of an island's deltas is the island's own, so it
writes its buffers itself, at the commits at which a checkpoint is due. It reads them again if the state that it begins with is
that of such a commit, bit for bit. Then no delta of the island after that commit counts, and none before it is missing. In every
other case the island begins with empty buffers: it does not know which of its deltas were committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.core.errors import CheckpointError
from atoll.core.nested_trees import trees
from atoll.engines.checkpoints import Checkpoints
from atoll.engines.elastic.engine import ElasticEngine
from atoll.engines.elastic.state_version import checksum, combine_checksums, digest_text
from atoll.engines.training_setup import passed_multiple
from atoll.runs.folder import RunFolder
from atoll.runs.run_settings import Keep
from atoll.telemetry.event_log import explained

_PART = "buffers"


class ErrorBufferFiles:
    """The saved error buffers of one island, each named for the round of its commit. A buffer that cannot be saved or read ends
    nothing: the island logs it, and its buffers of that round are lost."""

    def __init__(self, folder: RunFolder, name: str, keep: Keep, log: Callable[[str], object]) -> None:
        self._folder, self._save_every, self._log = folder, keep.save_every, log
        self._files = Checkpoints(folder.error_buffers / name, keep=keep.checkpoints)
        self._steps = 0
        """Of the run, at the last commit."""

    def restore(self, engine: ElasticEngine) -> None:
        """Give a new engine, which has just got its state, the buffers that belong to it."""
        self._steps, round_ = engine.steps_taken, engine.version.round
        if round_ not in self._files.rounds():
            return
        try:
            saved = self._files.at(round_)
            if saved.metadata.get("state") == _digest(engine):
                engine.set_residuals(self._files.load(saved, _PART, None))
                self._log(f"{engine.name} continues with its error buffers of round {round_}")
        except CheckpointError as error:
            self._log(f"{engine.name} begins with empty error buffers: {error}")

    def save_if_due(self, engine: ElasticEngine) -> None:
        """After a commit, of which this island has computed the state."""
        before, self._steps = self._steps, engine.steps_taken
        buffers = engine.residuals()
        if not passed_multiple(before, self._steps, self._save_every) or not any(trees(buffers)):
            return
        try:
            with explained("read", self._folder.settings):
                self._folder.settings.stat()  # else the folder is lost, and saving would make it anew
            self._files.save(engine.version.round, {_PART: buffers}, {"state": _digest(engine)})
        except CheckpointError as error:
            self._log(f"the error buffers of {engine.name} are not saved: {error}")


def _digest(engine: ElasticEngine) -> str:
    """Of the shared fields alone: a run that is resumed has other members and another epoch."""
    shared: dict[str, Any] = engine.shared()
    return digest_text(combine_checksums(checksum(tree.flat) for tree in trees(shared)))
