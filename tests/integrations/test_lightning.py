"""Lightning's real Trainer as an island."""

import importlib
import os
import sys
import warnings

import pytest
import torch
import torch.distributed as dist

import atoll
from atoll.algorithms.acco import ACCO
from atoll.algorithms.diloco import DiLoCo
from atoll.core.errors import ConfigError
from atoll.core.flat_tree import Tree
from atoll.optim.adam import AdamW
from atoll.testing.simulated_runs import Regression

lightning = pytest.importorskip("lightning.pytorch")
from atoll.integrations.lightning import IslandsCallback, alone  # noqa: E402

WORKLOAD = Regression(hidden=3)
ALGORITHM = DiLoCo(inner_steps=3)


class Module(lightning.LightningModule):
    def __init__(self, fails_at=None):
        super().__init__()
        self.net, self._fails_at = WORKLOAD.module(), fails_at

    def training_step(self, batch, index):
        if index == self._fails_at:
            raise ZeroDivisionError("a bug of the user")
        return WORKLOAD.loss(self.net, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)


class SavesAfterTheFirstEpoch(lightning.Callback):
    def __init__(self, path):
        self._path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0 and self._path is not None:
            trainer.save_checkpoint(self._path)


def batches(rank, count):
    return torch.utils.data.DataLoader([WORKLOAD.batches.batch(rank, step) for step in range(count)], batch_size=None)


def trainer(callback, epochs, path=None):
    return lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, SavesAfterTheFirstEpoch(path)],
    )


def fitted(group, counts, folder, torchrun, resumes):
    """Two epochs, uninterrupted or resumed after the first. Returns weights, rounds, steps, rank, and visible variables."""
    warnings.simplefilter("ignore")
    with torchrun():
        joined = alone()
        rank = joined.rank
        seen = [name for name in os.environ if name in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"}]
        module, callback, path = Module(), IslandsCallback(ALGORITHM, limit_s=30.0), f"{folder}/{rank}.ckpt"
        saved = path if resumes else None
        trainer(callback, 2, None if resumes else path).fit(module, batches(rank, counts[rank]), ckpt_path=saved)
        assert not dist.is_initialized()
    return Tree.of(module), callback.islands.rounds, callback.islands.steps, joined, seen


def test_trainers_with_uneven_data_end_with_the_same_weights(two, torchrun, tmp_path):
    one, other = two.run(fitted, (4, 7), str(tmp_path), torchrun(), False)
    assert one[0].equal(other[0])
    assert not one[0].equal(Tree.of(Module()))
    assert (one[1], other[1]) == (5, 5)
    assert (one[2], other[2]) == (8, 14)
    assert (one[3], other[3]) == ((0, 2), (1, 2))
    assert one[4] == other[4] == []


def test_a_round_resumes_from_a_checkpoint_to_the_bit(two, torchrun, tmp_path):
    straight = two.run(fitted, (4, 4), str(tmp_path), torchrun(), False)
    resumed = two.run(fitted, (4, 4), str(tmp_path), torchrun(), True)
    assert [found[2] for found in resumed] == [8, 8]
    for (params, rounds, *_), (expected, expected_rounds, *_) in zip(resumed, straight, strict=True):
        assert params.equal(expected)
        assert rounds == expected_rounds


def test_an_exception_closes_the_block_and_propagates():
    callback = IslandsCallback(ALGORITHM)
    module = Module(fails_at=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ZeroDivisionError):
            trainer(callback, 1).fit(module, batches(0, 4))
    assert callback.islands.steps == 2
    assert callback.state_dict() == {}
    assert not module.trainer.optimizers[0]._optimizer_step_post_hooks


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "atoll.integrations.lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(ConfigError, match=r"callbacks need lightning.pytorch, .*atoll\[lightning\]"):
        importlib.import_module("atoll.integrations.lightning")


def test_an_algorithm_that_steps_by_itself_is_refused():
    with pytest.raises(ConfigError, match=r"ACCO steps by itself, but Lightning has an optimizer\. Use DiLoCo"):
        IslandsCallback(ACCO(optimizer=AdamW()))


def test_one_island_trains_like_a_plain_loop():
    module, plain = Module(), WORKLOAD.module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(IslandsCallback(ALGORITHM), 1).fit(module, batches(0, 7))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.5)
    with atoll.islands(plain, optimizer, ALGORITHM):
        for step in range(7):
            optimizer.zero_grad()
            WORKLOAD.loss(plain, WORKLOAD.batches.batch(0, step)).backward()
            optimizer.step()
    assert torch.equal(Tree.of(module).flat, Tree.of(plain).flat)
