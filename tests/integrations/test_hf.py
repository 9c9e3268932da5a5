"""Hugging Face's Trainer as an island: the callback in the library's handler, and the real Trainer if accelerate is installed."""

import copy
import importlib
import io
import sys
import warnings
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from atoll.algorithms.async_local_sgd import AsyncLocalSGD
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.events import Evaluated, RunFinished
from atoll.core.flat_tree import Tree
from atoll.optim.adam import AdamW
from atoll.telemetry.event_log import read_events
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
    settings = {
        "load_best_model_at_end": False,
        "eval_on_start": False,
        "resume_from_checkpoint": None,
        "world_size": 1,
        "n_gpu": 0,
        **other,
    }
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
    with pytest.raises(
        ConfigError, match=r"Trainer trains data-parallel in 2 processes, and an island has 1. Call alone\(\) first"
    ):
        steps_of_a_trainer(IslandsCallback(ALGORITHM), arguments(tmp_path, world_size=2), *begin)
    with pytest.raises(CheckpointError, match=r"checkpoint-4 has no islands.pt: .* IslandsCallback\(resume="):
        steps_of_a_trainer(IslandsCallback(ALGORITHM), arguments(tmp_path), 4, 8)
    for algorithm, message in (
        (ZeRO1(optimizer=AdamW()), "ZeRO1 steps by itself, but Trainer has an optimizer"),
        (AsyncLocalSGD(inner_steps=3), r"AsyncLocalSGD is asynchronous.* atoll\.run_islands"),
    ):
        with pytest.raises(ConfigError, match=message):
            IslandsCallback(algorithm)


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
    with pytest.raises(ConfigError, match=r"callbacks need transformers.trainer_callback, .*\[hf\]"):
        importlib.import_module("atoll.integrations.hf")


# ---------------------------------------------------------------------------------------------------------- the real Trainer


EVALUATES = {"eval_strategy": "steps", "eval_steps": 2}


def examples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(16, (8,), generator=generator) for _ in range(count)]
    return [{"input_ids": text, "labels": text} for text in texts]


def real_trainer(folder, island, count, callbacks, held_out=None, **settings):
    """The real Trainer of a tiny GPT-2 and so many examples of this island, in batches of 2."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    arguments = transformers.TrainingArguments(
        output_dir=f"{folder}/island{island}",
        use_cpu=True,
        per_device_train_batch_size=2,
        num_train_epochs=1,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **settings,
    )
    model, data = transformers.GPT2LMHeadModel(config), examples(count, island)
    return transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=held_out, callbacks=callbacks)


def fitted(group, counts, folder, torchrun, resumes, held_out=None, others=(), devices=1):
    """Trains islands of so many steps in the real Trainer. Returns what became of them."""
    with torchrun():
        island, _ = joined = alone(devices)
        callback = IslandsCallback(ALGORITHM, limit_s=60.0, out=f"{folder}/log" if held_out else None)
        settings = {"save_steps": 4, **(EVALUATES if held_out else {})}
        with callback, redirect_stdout(io.StringIO()) as printed:
            trainer = real_trainer(folder, island, 2 * devices * counts[island], [callback, *others], held_out, **settings)
            out = Path(trainer.args.output_dir)
            trainer.train(resume_from_checkpoint=str(out / "checkpoint-4") if resumes else None)
    return SimpleNamespace(
        params=Tree.of(trainer.model),
        counts=(callback.islands.steps, callback.islands.rounds),
        logged=[line for line in trainer.state.log_history if "train_loss" not in line],
        printed=printed.getvalue(),
        weights={path.parent.name: load_file(path) for path in out.glob("checkpoint-*/model.safetensors")},
        saved=sorted(path.name for path in (out / "checkpoint-4").glob("islands*")),
        joined=joined,
        position=tuple(callback.islands._entered().topology.position),
    )


@pytest.fixture
def _accelerate():
    pytest.importorskip("accelerate", reason="Trainer itself needs it")


def losses(found, name="eval_loss"):
    return {line["step"]: line[name] for line in found.logged if name in line}


@pytest.mark.usefixtures("_accelerate")
def test_trainers_with_uneven_data_end_with_the_same_weights(two, torchrun, tmp_path):
    one, other = two.run(fitted, (5, 8), str(tmp_path), torchrun(), False)
    assert one.params.equal(other.params)
    assert (one.counts, other.counts) == ((5, 3), (8, 3))


@pytest.mark.usefixtures("_accelerate")
def test_evaluations_in_training_and_the_last_checkpoint_are_of_agreed_weights_and_island_0_alone_prints(two, torchrun, tmp_path):
    one, other = two.run(fitted, (5, 8), str(tmp_path), torchrun(), False, examples(2, 9))
    assert one.params.equal(other.params)
    (mine, others) = (losses(one), losses(other))
    assert mine[2] == others[2]
    assert mine[4] == others[4] != mine[2], "a round ended between them"
    assert mine[5] == others[8], "the weights that both agreed on in the end"
    assert "eval_loss" in one.printed
    assert other.printed == ""
    for found in (one, other):
        last = found.weights[f"checkpoint-{found.counts[0]}"]
        assert all(torch.equal(last[name], weights) for name, weights in found.params.tensors().items())
    events = list(read_events(tmp_path / "log/events.jsonl"))
    assert [event.loss for event in events if isinstance(event, Evaluated)] == [mine[2], mine[4], mine[5]]
    assert next(event.val_loss for event in events if isinstance(event, RunFinished)) == mine[5]


@pytest.mark.usefixtures("_accelerate")
def test_all_datasets_are_evaluated_with_the_agreed_weights_and_recorded(two, torchrun, tmp_path):
    held_out = {"first": examples(2, 8), "second": examples(2, 9)}
    one, other = two.run(fitted, (5, 5), str(tmp_path), torchrun(), False, held_out)
    found = [(losses(island, "eval_first_loss"), losses(island, "eval_second_loss")) for island in (one, other)]
    assert found[0] == found[1]
    means = [(found[0][0][step] + found[0][1][step]) / 2 for step in (2, 4, 5)]
    evaluated = [event for event in read_events(tmp_path / "log/events.jsonl") if isinstance(event, Evaluated)]
    assert [event.loss for event in evaluated] == pytest.approx(means)
    assert evaluated[0].metrics["second_loss"] == found[0][1][2]


class EvaluatesAtStep1(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_evaluate |= state.global_step == 1


@pytest.mark.usefixtures("_accelerate")
def test_an_evaluation_of_an_islands_own_weights_is_refused(tmp_path):
    for callbacks, refused in ((["islands", "other"], True), (["other", "islands"], False)):
        with IslandsCallback(ALGORITHM) as callback:
            both = [{"islands": callback, "other": EvaluatesAtStep1()}[name] for name in callbacks]
            trainer = real_trainer(tmp_path, 0, 4, both, examples(2, 9), save_strategy="no", **EVALUATES)
            with pytest.raises(ConfigError, match="Give IslandsCallback last") if refused else nullcontext():
                trainer.train()


@pytest.mark.usefixtures("_accelerate")
@pytest.mark.parametrize("held_out", [None, examples(2, 9)], ids=["saved", "evaluated-and-saved"])
def test_a_trainer_resumes_from_its_checkpoint(two, torchrun, tmp_path, held_out):
    straight = two.run(fitted, (8, 8), str(tmp_path / "one"), torchrun(), False, held_out)
    saved = [Tree.of(found.weights["checkpoint-4"]) for found in straight]
    assert saved[0].equal(saved[1]) == (held_out is not None), "what was evaluated is what is saved"
    resumed = two.run(fitted, (8, 8), str(tmp_path / "one"), torchrun(), True, held_out)
    assert [found.counts for found in resumed] == [found.counts for found in straight]
    for one, other in zip(resumed, straight, strict=True):
        assert one.params.equal(other.params)
    logs = [tmp_path / "one" / name / "events.jsonl" for name in ("log", "log-2")]
    assert [log.exists() for log in logs] == [held_out is not None] * 2
    if held_out is not None:
        ends = [next(event for event in read_events(log) if isinstance(event, RunFinished)) for log in logs]
        assert ends[0].digest == ends[1].digest


@pytest.mark.slow
@pytest.mark.usefixtures("_accelerate")
def test_a_trainer_trains_islands_of_two_devices_which_end_with_the_same_weights(four, torchrun, tmp_path):
    found = four.run(fitted, (8, 8), str(tmp_path), torchrun(), False, examples(4, 9), (), 2)
    assert all(one.params.equal(found[0].params) for one in found)
    assert [one.counts[0] for one in found] == [8, 8, 8, 8]
    assert [one.joined for one in found] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [one.position for one in found] == [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]
    assert all(one.saved == ["islands-1.pt", "islands.pt"] for one in found)
    assert losses(found[0]) == losses(found[2])
    resumed = four.run(fitted, (8, 8), str(tmp_path), torchrun(), True, examples(4, 9), (), 2)
    assert all(one.params.equal(found[0].params) for one in resumed)
