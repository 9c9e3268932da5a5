"""Lightning's real Trainer as an island."""

import importlib
import io
import math
import os
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import atoll
from atoll.algorithms.acco import ACCO
from atoll.algorithms.diloco import DiLoCo
from atoll.core.errors import ConfigError
from atoll.core.events import Computed, Evaluated
from atoll.core.flat_tree import Tree
from atoll.optim.adam import AdamW
from atoll.telemetry.event_log import read_events
from atoll.testing.simulated_runs import Regression

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

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

    def validation_step(self, batch, index):
        self.log("val_loss", WORKLOAD.loss(self.net, batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)


class Validations(lightning.Callback):
    """Keeps the loss of every validation."""

    def __init__(self):
        self.losses = []

    def on_validation_end(self, trainer, pl_module):
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


class SavesAfterTheFirstEpoch(lightning.Callback):
    def __init__(self, path):
        self._path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0 and self._path is not None:
            trainer.save_checkpoint(self._path)


def batches(rank, count, device=0, devices=1):
    """Those of a device, which begin again after 4 of an island: Lightning resumes an epoch with the first batch of its loader."""
    steps = range(device, count * devices, devices)
    return torch.utils.data.DataLoader([WORKLOAD.batches.batch(rank, step) for step in steps], batch_size=None)


def trainer(callbacks, epochs, devices=1, **settings):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"accelerator": "cpu", "devices": devices, "strategy": "ddp" if devices > 1 else "auto", **quiet, **settings}
    return lightning.Trainer(max_epochs=epochs, callbacks=callbacks, **settings)


def fitted(group, counts, folder, torchrun, resumes):
    """Two epochs, uninterrupted or resumed after the first. Returns weights, rounds, steps, rank, and visible variables."""
    warnings.simplefilter("ignore")
    with torchrun():
        joined = alone()
        rank = joined.rank
        seen = [name for name in os.environ if name in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"}]
        module, callback, path = Module(), IslandsCallback(ALGORITHM, limit_s=30.0), f"{folder}/{rank}.ckpt"
        saved = path if resumes else None
        trainer([callback, SavesAfterTheFirstEpoch(None if resumes else path)], 2).fit(
            module, batches(rank, counts[rank]), ckpt_path=saved
        )
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


def validated(group, folder, torchrun):
    """An epoch of 4 batches with validations after 2 and 4 of them. Returns losses and what was saved and printed."""
    warnings.simplefilter("ignore")
    with torchrun():
        rank = alone().rank
        module, callback, path = Module(), IslandsCallback(ALGORITHM, limit_s=30.0, out=f"{folder}/log"), f"{folder}/{rank}"
        seen = Validations()
        trains = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            logger=CSVLogger(path),
            log_every_n_steps=1,
            val_check_interval=2,
            enable_model_summary=False,
            default_root_dir=path,
            num_sanity_val_steps=0,
            callbacks=[callback, seen, lightning.callbacks.ModelCheckpoint(dirpath=path, filename="last")],
        )
        with redirect_stdout(io.StringIO()) as printed:
            trains.fit(module, batches(rank, 4), batches(3, 1))
    saved = torch.load(f"{path}/last.ckpt", weights_only=False)["state_dict"]
    final = all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in saved.items())
    return Tree.of(module), seen.losses, final, printed.getvalue(), any(Path(path).rglob("metrics.csv"))


def test_validations_and_the_last_checkpoint_are_of_agreed_weights_and_every_island_logs(two, torchrun, tmp_path):
    one, other = two.run(validated, str(tmp_path), torchrun())
    assert one[0].equal(other[0])
    assert one[1] == other[1]
    assert len(set(one[1])) > 1
    assert one[2]
    assert other[2]
    assert "Epoch" in one[3]
    assert "Epoch" not in other[3]
    assert one[4]
    assert other[4]
    events = list(read_events(tmp_path / "log/events.jsonl"))
    assert [event.loss for event in events if isinstance(event, Evaluated)] == one[1]
    assert all(math.isfinite(event.loss) for event in events if isinstance(event, Computed))


def monitored(group, folder, torchrun, resumed_from, devices=1):
    """An epoch of 8 steps with a validation after each second, of which the best is saved; or from that checkpoint on. Returns
    weights, losses, the loss of the weights in the best checkpoint, steps, and the position of the process."""
    warnings.simplefilter("ignore")
    with torchrun():
        rank = alone(devices).rank
        module, callback, seen = Module(), IslandsCallback(ALGORITHM, limit_s=30.0), Validations()
        path = f"{folder}/{rank}"
        best = lightning.callbacks.ModelCheckpoint(dirpath=path, monitor="val_loss", save_top_k=-1, filename="{step}")
        settings = {"val_check_interval": 2, "num_sanity_val_steps": 0, "enable_checkpointing": True}
        start = resumed_from and f"{path}/step={resumed_from}.ckpt"
        trains = trainer([callback, seen, best], 1, devices, use_distributed_sampler=False, **settings)
        share = {"device": trains.global_rank, "devices": devices}
        trains.fit(module, batches(rank, 8, **share), batches(3, 1, **share), ckpt_path=start)
    scored = Module()
    scored.load_state_dict(torch.load(best.best_model_path, weights_only=False)["state_dict"])
    with torch.no_grad():
        loss = sum(float(WORKLOAD.loss(scored.net, batch)) for batch in batches(3, devices)) / devices
    return Tree.of(module), seen.losses, loss, callback.islands.steps, tuple(callback.islands._entered().topology.position)


def test_a_monitored_checkpoint_holds_the_weights_that_were_scored_and_resumes_to_the_bit(two, torchrun, tmp_path):
    straight = two.run(monitored, str(tmp_path), torchrun(), None)
    assert all(best == min(losses) for _, losses, best, *_ in straight)
    resumed = two.run(monitored, str(tmp_path), torchrun(), 4)
    for (params, _, _, steps, _), (expected, *_) in zip(resumed, straight, strict=True):
        assert steps == 8
        assert params.equal(expected)


def averaged_gradients(group):
    """The weights after 8 steps of islands of one device, each on the batches of two."""
    plain = WORKLOAD.module()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.5)
    with atoll.islands(plain, optimizer, ALGORITHM):
        for step in range(8):
            optimizer.zero_grad()
            for position in (2 * step, 2 * step + 1):
                (WORKLOAD.loss(plain, WORKLOAD.batches.batch(dist.get_rank(), position)) / 2).backward()
            optimizer.step()
    return Tree.of(plain)


@pytest.mark.slow
def test_islands_of_two_devices_train_data_parallel_and_resume_from_checkpoints_of_one_process(two, four, torchrun, tmp_path):
    straight = four.run(monitored, str(tmp_path), torchrun(), None, 2)
    assert [position for *_, position in straight] == [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]
    params, losses, best, *_ = straight[0]
    assert all(found[0].equal(params) for found in straight)
    assert all(found[1] == losses for found in straight)
    assert best == pytest.approx(min(losses))
    torch.testing.assert_close(params.flat, two.run(averaged_gradients)[0].flat)
    for at in (4, 6):  # in the middle of a round, and at the end of one
        saved = torch.load(tmp_path / f"0/step={at}.ckpt", weights_only=True)["callbacks"]["LightningIslands"]["devices"]
        assert [state["position"] for state in saved] == [[0, 2, 0, 2], [0, 2, 1, 2]]
        assert len({state["module_digest"] for state in saved}) == 1, "both devices hold the same weights"
        resumed = four.run(monitored, str(tmp_path), torchrun(), at, 2)
        assert all(found[0].equal(params) for found in resumed)
        assert all(found[1] == losses[at // 2 :] for found in resumed)
        assert [found[3] for found in resumed] == [8] * 4


class SavesInTheFirstProcess(lightning.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero:
            trainer.save_checkpoint("nowhere")


def saved_by_one(group, torchrun):
    """What ends the training of each device of an island whose first one saves alone."""
    warnings.simplefilter("ignore")
    with torchrun():
        alone(2)
        try:
            trainer([IslandsCallback(ALGORITHM, limit_s=2.0), SavesInTheFirstProcess()], 1, 2).fit(Module(), batches(0, 8))
        except Exception as error:
            return repr(error)


def test_a_checkpoint_that_the_first_device_saves_alone_ends_with_an_error(two, torchrun):
    first, second = two.run(saved_by_one, torchrun())
    assert "device 0 of island 0 could not receive from device 1 of island 0 within 2 s" in first
    assert "call trainer.save_checkpoint in each of its processes" in first
    assert second is not None


@pytest.mark.parametrize("name", ["StochasticWeightAveraging", "EMAWeightAveraging"])
def test_averages_of_one_islands_own_weights_are_refused(name):
    average = getattr(lightning.callbacks, name)(**({"swa_lrs": 0.1} if name.startswith("S") else {}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        averages = trainer([IslandsCallback(ALGORITHM), average], 2)
        with pytest.raises(ConfigError, match=f"{name} would average weights of one island"):
            averages.fit(Module(), batches(0, 4))


def test_an_exception_closes_the_block_and_propagates():
    callback = IslandsCallback(ALGORITHM)
    module = Module(fails_at=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ZeroDivisionError):
            trainer([callback], 1).fit(module, batches(0, 4))
    assert callback.islands.steps == 2
    assert callback.state_dict() == {}
    assert not module.trainer.optimizers[0]._optimizer_step_post_hooks


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "atoll.integrations.lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(ConfigError, match=r"callbacks need lightning.pytorch, .*\[lightning\]"):
        importlib.import_module("atoll.integrations.lightning")


def test_devices_that_hold_a_part_of_the_module_are_refused():
    module = Module()
    strategy = lightning.strategies.ModelParallelStrategy()
    shards = SimpleNamespace(
        optimizers=[module.configure_optimizers()], callbacks=[], world_size=2, model=module, strategy=strategy
    )
    with pytest.raises(ConfigError, match=r'ModelParallelStrategy with 2 devices: .* Trainer\(strategy="ddp"\)'):
        IslandsCallback(ALGORITHM).on_train_start(shards, module)


def test_an_algorithm_that_steps_by_itself_or_needs_a_hub_is_refused_before_there_is_a_trainer():
    with pytest.raises(ConfigError, match=r"ACCO steps by itself, but Lightning has an optimizer\. Use DiLoCo"):
        IslandsCallback(ACCO(optimizer=AdamW()))
    with pytest.raises(ConfigError, match=r"AsyncLocalSGD is asynchronous.* atoll\.run_islands"):
        IslandsCallback(atoll.AsyncLocalSGD(inner_steps=3))


def test_one_island_trains_like_a_plain_loop():
    module, plain = Module(), WORKLOAD.module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer([IslandsCallback(ALGORITHM)], 1).fit(module, batches(0, 7))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.5)
    with atoll.islands(plain, optimizer, ALGORITHM):
        for step in range(7):
            optimizer.zero_grad()
            WORKLOAD.loss(plain, WORKLOAD.batches.batch(0, step)).backward()
            optimizer.step()
    assert torch.equal(Tree.of(module).flat, Tree.of(plain).flat)
