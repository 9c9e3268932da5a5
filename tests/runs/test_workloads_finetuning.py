"""A pretrained model on instructions: padding changes nothing, tokens weigh the same, and runs train, resume and export."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

import atoll
from atoll.algorithms.ddp import DDP
from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.zero import ZeRO1
from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.events import Evaluated, Saved
from atoll.core.flat_tree import Tree
from atoll.data.instructions import IGNORED_LABEL, Instructions
from atoll.models.pretrained import Pretrained
from atoll.optim.adam import AdamW
from atoll.optim.schedules import Cosine
from atoll.optim.sgd import SGD
from atoll.replica.flat_parameters import trainable_weights
from atoll.runs.cluster import Cluster
from atoll.runs.run_settings import Keep, Run, Train
from atoll.runs.workloads import data_fingerprint, sharded_workload, single_shard_workload
from atoll.telemetry.event_log import read_events
from atoll.testing.tiny_pretrained_model import SUMS, save_tiny_model, write_jsonl


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetuning")
    save_tiny_model(folder / "model")
    write_jsonl(folder / "sums.jsonl", SUMS)
    return folder


@pytest.fixture(scope="module")
def finetuning(place):
    return Run(
        recipe="sums",
        model=Pretrained(path=str(place / "model")),
        data=Instructions(path=str(place / "sums.jsonl"), learn="answer"),
        algorithm=ZeRO1(),
        optimizer=AdamW(lr=Cosine(lr=1e-2), betas=(0.9, 0.95), weight_decay=0.0),
        train=Train(steps=6, batch_size=4, clip_norm=None),
        cluster=Cluster(islands=2),
        keep=Keep(evaluate_every=3, save_every=3, checkpoints=9),
    )


@pytest.fixture(scope="module")
def workload(finetuning):
    run = finetuning.resolved
    return single_shard_workload(run, run.data.load())


@pytest.fixture(scope="module")
def straight(finetuning, tmp_path_factory):
    """The run that was never stopped."""
    return atoll.run(finetuning, out=tmp_path_factory.mktemp("straight") / "run")


def gradient_of(workload, batch):
    """The loss of a batch, its gradient, and how many tokens it is the mean over."""
    module = workload.module()
    loss = workload.loss(module, batch)
    loss.backward()
    return loss.detach(), Tree.of({name: p.grad for name, p in module.named_parameters()}), workload.batches.tokens(batch)


def left_by(folder):
    """What a run leaves, to the byte."""
    return (folder / "events.jsonl").read_bytes(), (folder / "final.safetensors").read_bytes()


# ------------------------------------------------------------------------------------------------------------- the workload


def test_the_loss_is_the_librarys_own(workload):
    batch, module = workload.batches.batch(0, 0), workload.module()
    assert workload.loss(module, batch).item() == pytest.approx(module(**batch).loss.item(), rel=1e-6)


def test_padding_changes_neither_loss_nor_gradient(workload):
    batch = workload.batches.batch(0, 0)
    more = torch.full((4, 9), 7)  # any id will do: nothing sees it
    padded = {
        "input_ids": torch.cat((batch["input_ids"], more), dim=1),
        "attention_mask": torch.cat((batch["attention_mask"], torch.zeros_like(more)), dim=1),
        "labels": torch.cat((batch["labels"], torch.full_like(more, IGNORED_LABEL)), dim=1),
    }
    (one, gradient, tokens), (two, same_gradient, same_tokens) = (gradient_of(workload, given) for given in (batch, padded))
    assert (tokens, one.item()) == (same_tokens, pytest.approx(two.item(), rel=1e-6))
    torch.testing.assert_close(same_gradient.flat, gradient.flat, rtol=1e-4, atol=1e-7)


def test_batches_weighted_by_tokens_are_one_big_batch(finetuning, workload):
    """The identity on which algorithms with `weigh=tokens` rest."""
    parts = [gradient_of(workload, workload.batches.batch(0, position)) for position in range(3)]
    run = replace(finetuning, train=replace(finetuning.train, batch_size=12)).resolved
    loss, gradient, tokens = gradient_of(workload, single_shard_workload(run, run.data.load()).batches.batch(0, 0))
    assert len({count for _, _, count in parts}) > 1, "the batches differ in tokens, or this shows nothing"
    assert sum(count for _, _, count in parts) == tokens
    assert sum(float(part) * count for part, _, count in parts) / tokens == pytest.approx(loss.item(), rel=1e-6)
    weighted = sum(part.flat * count for _, part, count in parts) / tokens
    torch.testing.assert_close(weighted, gradient.flat, rtol=1e-4, atol=1e-7)
    unweighted = sum(part.flat for _, part, _ in parts) / 3
    assert (unweighted - gradient.flat).norm() > 100 * (weighted - gradient.flat).norm()


def test_a_batch_with_nothing_to_learn_has_loss_0_and_gradient_0(workload):
    batch = workload.batches.batch(0, 0)
    loss, gradient, tokens = gradient_of(workload, {**batch, "labels": torch.full_like(batch["labels"], IGNORED_LABEL)})
    assert (loss.item(), tokens) == (0.0, 0)
    assert not gradient.flat.any()


def test_a_model_is_judged_by_the_mean_over_all_held_out_tokens(workload):
    module = workload.module().eval()
    with torch.no_grad():
        parts = [(workload.loss(module, batch).item(), workload.batches.tokens(batch)) for batch in workload.validation]
        measured = workload.evaluate(module)
    total = sum(tokens for _, tokens in parts)
    assert measured == {"loss": pytest.approx(sum(loss * tokens for loss, tokens in parts) / total, rel=1e-6)}


def test_the_tokenizer_is_the_models_own_unless_another_is_named(finetuning):
    assert finetuning.resolved.data.tokenizer == finetuning.model.path
    named = replace(finetuning, data=replace(finetuning.data, tokenizer="elsewhere"))
    assert named.resolved.data.tokenizer == "elsewhere"


def test_the_fingerprint_is_of_model_and_examples(finetuning, workload, tmp_path):
    other = Pretrained(path=str(save_tiny_model(tmp_path / "other", seed=1)))
    run, mine = finetuning.resolved, data_fingerprint(workload)
    assert mine == data_fingerprint(single_shard_workload(run, run.data.load()))
    assert mine != data_fingerprint(replace(workload, model=other))
    assert mine != data_fingerprint(sharded_workload(run, run.data.load(), Tree.of({})))


# ---------------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("algorithm", [ZeRO1(accumulation=2), DDP(), DiLoCo(inner_steps=3)], ids=lambda a: type(a).__name__)
def test_finetuning_lowers_the_loss(algorithm, finetuning, tmp_path):
    run = replace(finetuning, algorithm=algorithm, train=replace(finetuning.train, steps=9))
    done = atoll.run(run, out=tmp_path / "run")
    losses = [event.loss for event in read_events(done.folder / "events.jsonl", [Evaluated])]
    assert losses[-1] < losses[0] - 1.0
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(("size", "pieces", "accumulation"), [(4, 1, 3), (12, 3, 1), (6, 2, 2)], ids=str)
def test_weighted_by_tokens_it_does_not_matter_how_an_update_is_cut(size, pieces, accumulation, finetuning, tmp_path):
    """Twelve examples an update: as three batches, as three pieces of one, or as two batches of two pieces."""

    def after(size, pieces, accumulation, folder):
        train = replace(finetuning.train, steps=2, batch_size=size, micro_batches=pieces)
        algorithm = DDP(accumulation=accumulation, weigh="tokens", optimizer=SGD(lr=0.1))
        run = replace(finetuning, algorithm=algorithm, train=train, cluster=replace(finetuning.cluster, islands=1))
        return atoll.run(run, out=folder).params.flat

    whole, cut = after(12, 1, 1, tmp_path / "whole"), after(size, pieces, accumulation, tmp_path / "cut")
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-6)


def test_a_run_counts_the_tokens_it_learnt_from(finetuning, straight):
    run = finetuning.resolved
    batches = sharded_workload(run, run.data.load(), Tree.of({})).batches
    read = sum(batches.tokens(batches.batch(shard, position)) for shard in range(2) for position in range(6))
    assert straight.summary.tokens == read


def test_frozen_parameters_do_not_move_and_tied_ones_move_together(finetuning, place, tmp_path):
    run = replace(finetuning, model=replace(finetuning.model, frozen=("transformer.wpe.*", "*.mlp.*")))
    trained, before = atoll.run(run, out=tmp_path / "run").module, finetuning.model.build()
    for (name, one), (_, two) in zip(trained.named_parameters(), before.named_parameters(), strict=True):
        assert torch.equal(one, two) == (".wpe." in name or ".mlp." in name), name
    assert trained.lm_head.weight is trained.transformer.wte.weight


class Fuse:
    """Stops a run before its second checkpoint."""

    def emit(self, event):
        if isinstance(event, Saved) and event.round == 6:
            raise KeyboardInterrupt


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_stopped_and_resumed_a_run_leaves_the_same_bytes(dropout, finetuning, tmp_path):
    model = Pretrained(path=str(save_tiny_model(tmp_path / "model", dropout=dropout)), frozen=("transformer.wpe.*",))
    run = replace(finetuning, model=model)
    whole = atoll.run(run, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        atoll.run(run, out=tmp_path / "stopped", sinks=[Fuse()])
    assert atoll.resume(tmp_path / "stopped").summary.resumed_from_round == 3
    assert left_by(tmp_path / "stopped") == left_by(whole.folder)


def test_a_run_can_have_a_warm_start_pieces_and_fewer_shards_than_islands(finetuning, tmp_path):
    data, train = replace(finetuning.data, shards=1), replace(finetuning.train, warm_start_steps=2, micro_batches=2)
    done = atoll.run(replace(finetuning, data=data, train=train), out=tmp_path / "run")
    assert done.summary.warm_start_tokens > 0
    assert done.summary.val_loss < 5.6


def test_a_finished_run_is_reopened_with_its_weights(straight):
    again = atoll.resume(straight.folder)
    assert again.summary == straight.summary
    assert Tree.of(again.module).equal(straight.params)


def test_a_checkpoint_does_not_continue_from_another_model(finetuning, tmp_path):
    model = Pretrained(path=str(save_tiny_model(tmp_path / "model")))
    with pytest.raises(KeyboardInterrupt):
        atoll.run(replace(finetuning, model=model), out=tmp_path / "run", sinks=[Fuse()])
    shutil.rmtree(model.path)
    save_tiny_model(model.path, seed=1)
    with pytest.raises(CheckpointError, match=r"was saved by another run"):
        atoll.resume(tmp_path / "run")


# ------------------------------------------------------------------------------------------------------------------ refusals


def test_paths_that_a_recipe_leaves_open_are_asked_for_with_the_command(finetuning, tmp_path):
    command = r"atoll run sums --set model\.path=FOLDER --set data\.path=FILE\.jsonl"
    empty = replace(finetuning, model=Pretrained(), data=Instructions())
    with pytest.raises(ConfigError, match=rf"model\.path and data\.path are not given.*{command}"):
        atoll.run(empty, out=tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"^data\.path is not given.*{command}"):
        atoll.run(replace(empty, model=finetuning.model), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_pretrained_model_reads_text_and_instructions_and_no_points(finetuning):
    with pytest.raises(ConfigError, match=r"model is Pretrained and data is Gaussians: .*Set data=Instructions, or data=Text, or"):
        replace(finetuning, data=atoll.Gaussians())
    with pytest.raises(ConfigError, match=r"model is MLP and data is Instructions: .*Set data=Gaussians, or model=Pretrained"):
        replace(finetuning, model=atoll.MLP.small())


def test_examples_longer_than_the_model_reads_leave_no_folder(finetuning, tmp_path):
    short = Pretrained(path=str(save_tiny_model(tmp_path / "short", positions=5)))
    with pytest.raises(ConfigError, match=r"has \d+ tokens, and the model in .* reads at most 5. Set data\.max_len=5"):
        atoll.run(replace(finetuning, model=short), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_models_tokenizer_is_refused(workload):
    encoded = workload.data.train
    foreign = replace(encoded, ids=encoded.ids.clip(min=999))
    beyond = replace(workload, data=replace(workload.data, train=foreign))
    with pytest.raises(ConfigError, match=r"hold the token 999, and the model in .* has 257"):
        beyond.module()


def test_the_weights_lie_in_one_buffer_as_those_of_other_models(workload):
    assert type(trainable_weights(workload.module())).__name__ == "FlatModule"
