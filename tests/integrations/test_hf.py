"""Hugging Face's Trainer as an island: the callback in the library's handler, and the real Trainer if accelerate is installed."""

import copy
import importlib
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.flat_tree import Tree
from atoll.optim.adam import AdamW
from atoll.testing.simulated_runs import Regression

transformers = pytest.importorskip("transformers")
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl, TrainerState  # noqa: E402

from atoll.integrations.hf import FILE, IslandsCallback, alone  # noqa: E402

WORKLOAD = Regression(hidden=3)
ALGORITHM = DiLoCo(inner_steps=3)


class WrappedOptimizer:
    """A wrapped optimizer, as accelerate passes it to callbacks."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def arguments(folder, **other):
    settings = {"load_best_model_at_end": False, "resume_from_checkpoint": None, "world_size": 1, "n_gpu": 0, **other}
    return SimpleNamespace(output_dir=str(folder), **settings)


def steps_of_a_trainer(callback, args, start, stop, save_at=None, saved=None):
    """A training loop that calls the callbacks through Trainer's handler."""
    model = WORKLOAD.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    handler = CallbackHandler([DefaultFlowCallback, callback], model, None, WrappedOptimizer(optimizer), None)
    state, control = TrainerState(global_step=start), TrainerControl()
    kept = None
    with callback:
        handler.call_event("on_train_begin", args, state, control)
        for step in range(start, stop):
            WORKLOAD.loss(model, WORKLOAD.batches.batch(0, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            state.global_step += 1
            if state.global_step == save_at:
                handler.call_event("on_save", args, state, control)
                kept = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        handler.call_event("on_train_end", args, state, control)
    return Tree.of(model), kept


def test_a_round_resumes_from_a_checkpoint_to_the_bit(tmp_path):
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    straight, saved = steps_of_a_trainer(IslandsCallback(ALGORITHM), arguments(tmp_path), 0, 8, save_at=4)
    assert (folder / FILE).exists()
    for callback, args in (
        (IslandsCallback(ALGORITHM), arguments(tmp_path)),
        (IslandsCallback(ALGORITHM), arguments("elsewhere", resume_from_checkpoint=str(folder))),
        (IslandsCallback(ALGORITHM, resume=folder), arguments("elsewhere", resume_from_checkpoint=True)),
    ):
        resumed, _ = steps_of_a_trainer(callback, args, 4, 8, saved=saved)
        assert resumed.equal(straight)
        assert callback.islands.steps == 8


def test_unsupported_settings_of_trainer_are_refused(tmp_path):
    begin = (0, 1)
    with pytest.raises(ConfigError, match="load_best_model_at_end=True would put old weights"):
        steps_of_a_trainer(IslandsCallback(ALGORITHM), arguments(tmp_path, load_best_model_at_end=True), *begin)
    with pytest.raises(ConfigError, match=r"Trainer trains data-parallel in 2 processes. Call alone\(\) first"):
        steps_of_a_trainer(IslandsCallback(ALGORITHM), arguments(tmp_path, world_size=2), *begin)
    with pytest.raises(CheckpointError, match=r"checkpoint-4 has no islands.pt: .* IslandsCallback\(resume="):
        steps_of_a_trainer(IslandsCallback(ALGORITHM), arguments(tmp_path), 4, 8)
    with pytest.raises(ConfigError, match=r"ZeRO1 steps by itself, but Trainer has an optimizer"):
        IslandsCallback(ZeRO1(optimizer=AdamW()))


def test_an_exception_closes_the_block_and_propagates(tmp_path):
    callback = IslandsCallback(ALGORITHM)
    with pytest.raises(CheckpointError, match=r"could not write .*islands.pt: No such file"):
        steps_of_a_trainer(callback, arguments(tmp_path / "nowhere"), 0, 2, save_at=1)
    with pytest.raises(ConfigError, match="this block is over"):
        callback.islands.load_state_dict(callback.islands.state_dict())


def test_a_callback_can_restart_after_an_aborted_training(tmp_path):
    callback, model = IslandsCallback(ALGORITHM), WORKLOAD.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    begun = TrainerState(global_step=0), TrainerControl()
    callback.on_train_begin(arguments(tmp_path), *begun, model=model, optimizer=optimizer)
    aborted = callback.islands
    steps_of_a_trainer(callback, arguments(tmp_path), 0, 3)
    assert callback.islands is not aborted
    assert callback.islands.steps == 3
    assert not optimizer._optimizer_step_post_hooks


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "atoll.integrations.hf")
    monkeypatch.setitem(sys.modules, "transformers.trainer_callback", None)
    with pytest.raises(ConfigError, match=r"callbacks need transformers.trainer_callback, .*atoll\[hf\]"):
        importlib.import_module("atoll.integrations.hf")


# ---------------------------------------------------------------------------------------------------------- the real Trainer


def fitted(group, counts, folder, torchrun, resumes):
    """Trains a tiny GPT-2 in the real Trainer. Returns weights, steps and rounds."""
    warnings.simplefilter("ignore")
    with torchrun():
        rank, _ = alone()
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
        )
        model = transformers.GPT2LMHeadModel(config)
        generator = torch.Generator().manual_seed(rank)
        texts = [torch.randint(16, (8,), generator=generator) for _ in range(2 * counts[rank])]
        args = transformers.TrainingArguments(
            output_dir=f"{folder}/island{rank}",
            use_cpu=True,
            per_device_train_batch_size=2,
            num_train_epochs=1,
            save_steps=4,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        )
        callback = IslandsCallback(ALGORITHM, limit_s=60.0)
        dataset = [{"input_ids": text, "labels": text} for text in texts]
        with callback:
            trainer = transformers.Trainer(model, args, train_dataset=dataset, callbacks=[callback])
            trainer.train(resume_from_checkpoint=f"{args.output_dir}/checkpoint-4" if resumes else None)
    return Tree.of(model), callback.islands.steps, callback.islands.rounds


def test_trainers_with_uneven_data_end_with_the_same_weights(two, torchrun, tmp_path):
    pytest.importorskip("accelerate", reason="Trainer itself needs it")
    one, other = two.run(fitted, (5, 8), str(tmp_path), torchrun(), False)
    assert one[0].equal(other[0])
    assert (one[1:], other[1:]) == ((5, 3), (8, 3))


def test_a_trainer_resumes_from_its_checkpoint(two, torchrun, tmp_path):
    pytest.importorskip("accelerate", reason="Trainer itself needs it")
    straight = two.run(fitted, (8, 8), str(tmp_path), torchrun(), False)
    resumed = two.run(fitted, (8, 8), str(tmp_path), torchrun(), True)
    assert [found[1:] for found in resumed] == [found[1:] for found in straight]
    for (params, *_), (expected, *_) in zip(resumed, straight, strict=True):
        assert params.equal(expected)
