"""The two-machine commands of docs/real_processes.md and docs/own_loop.md, typed on two machines whose /etc/hosts name them
127.0.0.1, and without GLOO_SOCKET_IFNAME."""

import re
import shutil
from pathlib import Path

import pytest

from atoll.testing import network_namespaces
from tests.machines import PATIENCE_S, SHORT_RUN, Machine, library_lines, until_said, with_settings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "real_processes.md"
OWN_LOOP = ROOT / "docs" / "own_loop.md"
UNAVAILABLE = network_namespaces.unavailable_reason()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))]
SLOW = (*SHORT_RUN, "engine.step_delay=1.0", "cluster.step_time_s=[0.05]")


def page_commands(program="torchrun"):
    """The commands of the first and of the second machine."""
    section = PAGE.read_text().partition("## On several machines")[2]
    return [line for line in re.findall(r"```sh\n(.*?)\n```", section, flags=re.DOTALL) if line.startswith(f"{program} ")]


@pytest.fixture
def machines(tmp_path):
    """Two machines as installers leave them: each resolves its own name to 127.0.0.1, and the other's to its address."""
    with network_namespaces.linked_pair() as (first, second):
        yield (
            Machine(first, tmp_path / "one", "first.example", ["127.0.0.1 first.example first"]),
            Machine(second, tmp_path / "two", "second.example", ["127.0.0.1 second.example", f"{first.address} first.example"]),
        )


LATE = """#!/bin/sh
while [ ! -e go ]; do sleep 0.1; done
exec python "$@"
"""


def test_the_pages_commands_train_though_each_machine_resolves_its_name_to_loopback(machines):
    (one, two), (here, there) = machines, (with_settings(line, SLOW) for line in page_commands())
    (two.folder / "late").write_text(LATE)
    (two.folder / "late").chmod(0o755)
    two.environment["PYTHON_EXEC"] = "./late"  # with which torchrun starts ranks
    with one.started(here, "screen") as first, two.started(there, "screen") as second:
        until_said(first, "waiting for rank 1 to start (15 s of at most 3600 s)")
        (two.folder / "go").touch()
        assert (first.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (0, 0), first.log.read_text() + second.log.read_text()
        said, also = first.log.read_text(), second.log.read_text()
    assert "rank 0 on first.example exchanges over isle0 (10.77.0.1) (it routes to the other machines" in said
    assert "rank 1 on second.example exchanges over isle1 (10.77.0.2) (it routes to the other machines" in also
    assert "rank 1 of 2; log: runs/two/logs/rank-1.log; rank 0 is on first.example" in also
    assert re.search(r"demo-diloco, rank 1: training +\d+ %  loss \d", also)
    assert re.search(r"finished: 40 steps in 4 rounds, loss [\d.]+ on this rank. The weights .* runs/two on first.example", also)
    assert (two.folder / "runs/two/logs/rank-1.log").exists()
    assert (one.folder / "runs/two/final.safetensors").exists()


@pytest.mark.parametrize("first", [0, 1])
def test_a_machine_whose_command_is_typed_first_says_whom_it_waits_for(machines, first):
    """Also by atoll's own commands, without torchrun."""
    lines = [with_settings(line, SLOW) for line in page_commands("atoll run")]
    with machines[first].started(lines[first], "screen") as one:
        awaited = ("rank 1 to start", "the store of the ranks at first.example:29500")[first]
        until_said(one, f"waiting for {awaited} (15 s")
        with machines[1 - first].started(lines[1 - first], "screen") as other:
            ends = one.wait(PATIENCE_S), other.wait(PATIENCE_S)
    said, also = ((machine.folder / "screen").read_text() for machine in machines)
    assert ends == (0, 0), said + also
    assert "rank 0 on first.example exchanges over isle0 (10.77.0.1)" in said
    assert "rank 1 of 2; log: runs/two/logs/rank-1.log; rank 0 is on first.example" in also
    assert "torch's launcher executes" not in said
    assert library_lines(said + also) == []
    if first == 0:
        resume = f"atoll run --resume runs/two {lines[0][lines[0].index('--set engine.nodes') :].partition(' --out')[0]}"
        with machines[0].started(resume, "screen") as finished:  # its result is printed without the other machine
            assert finished.wait(PATIENCE_S) == 0
    assert (machines[0].folder / "runs/two/final.safetensors").exists()


def test_machines_that_cannot_connect_end_within_seconds_and_both_name_the_setting(machines):
    (one, two), (here, there) = machines, page_commands()
    two.typed("ip link add virtual0 type bridge && ip address add 172.17.0.1/16 dev virtual0 && ip link set virtual0 up")
    two.environment["GLOO_SOCKET_IFNAME"] = "virtual0"
    with one.started(here, "screen") as first, two.started(there, "screen") as second:
        assert first.wait(PATIENCE_S) != 0
        assert second.wait(PATIENCE_S) != 0
        said = first.log.read_text(), second.log.read_text()
    for text in said:
        assert re.search(r"rank 0 on first.example has no route to other ranks \(172.17.0.1\). It has isle0 \(10.77.0.1\)", text)
        assert "on each: export GLOO_SOCKET_IFNAME=NAME" in text
    assert not (one.folder / "runs").exists()


def test_machines_that_were_started_for_different_numbers_of_ranks_are_refused_at_once(machines):
    lines = page_commands("atoll run")
    lines[1] = re.sub(r"--processes \d+", "--processes 4", lines[1])
    with machines[0].started(lines[0], "screen") as first, machines[1].started(lines[1], "screen") as second:
        assert first.wait(PATIENCE_S) == second.wait(PATIENCE_S) == 2
        said = first.log.read_text(), second.log.read_text()
    numbers = "first.example was started for 2 processes on 2 machines, and second.example for 4 processes on 2 machines"
    for text in said:
        assert f"error: {numbers}. Give --processes and engine.nodes the same values on all machines" in text


def both_said(machines, lines):
    """Types a line on each machine; what both said when they have ended."""
    (one, two), (here, there) = machines, lines
    with one.started(here, "screen") as first, two.started(there, "screen") as second:
        ends = first.wait(PATIENCE_S), second.wait(PATIENCE_S)
        said = first.log.read_text(), second.log.read_text()
    assert ends == (0, 0), "".join(said)
    for number, text in enumerate(said):
        assert f"exchanges over isle{number} (10.77.0.{number + 1}) (it routes to the other machines" in text
    return said


def test_the_commands_of_the_page_about_own_loops_train_on_two_machines(machines):
    lines = re.findall(r"^python -m torch.distributed.run --nnodes 2 .*$", OWN_LOOP.read_text(), flags=re.MULTILINE)
    assert len(lines) == 2
    for machine in machines:
        shutil.copytree(ROOT / "examples", machine.folder / "examples", ignore=shutil.ignore_patterns("deploy"))
    said, also = both_said(machines, [line.replace("10.0.0.1", machines[0].namespace.address) for line in lines])
    assert re.search(r"DiLoCo on 2 islands: 300 steps, 16 rounds, .* MB sent", said)
    assert re.search(r"ACCO on 2 islands: 600 steps, 300 rounds, .* MB sent", said)
    assert "on 2 islands" not in also


TRAINER = """
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import atoll
from atoll.integrations.hf import IslandsCallback, alone

rank, size = alone(devices=int(sys.argv[1]))
sequences = torch.randint(64, (64, 8), generator=torch.Generator().manual_seed(0))
shard = [{"input_ids": sequence, "labels": sequence} for sequence in sequences[rank::size]]
torch.manual_seed(rank)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=2))
arguments = TrainingArguments(
    f"out{rank}", max_steps=6, per_device_train_batch_size=4, use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True
)
callback = IslandsCallback(atoll.DiLoCo(inner_steps=3), trusted_network=True)
with callback:
    Trainer(model, arguments, train_dataset=shard, callbacks=[callback]).train()
total = sum(weight.double().abs().sum().item() for weight in model.parameters())
print(f"island {rank} of {size}: {callback.islands.rounds} rounds, {callback.islands.steps} steps, weights {total!r}", flush=True)
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_islands_of_one_and_of_two_processes_of_a_trainer_find_each_other_across_machines(machines, devices):
    pytest.importorskip("accelerate", reason="Trainer itself needs it")
    how = f"--nnodes 2 --nproc-per-node {devices} --master-addr first.example --master-port 29500"
    for machine in machines:
        (machine.folder / "trainer.py").write_text(TRAINER)
    said = both_said(machines, [f"torchrun {how} --node-rank {number} trainer.py {devices}" for number in range(2)])
    lines = [re.findall(r"island (\d) of 2: 2 rounds, 6 steps, weights (\S+)", text) for text in said]
    assert [island for text in lines for island, _ in text] == ["0"] * devices + ["1"] * devices
    assert len({weights for text in lines for _, weights in text}) == 1
