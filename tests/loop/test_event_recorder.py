"""The event log of an own loop is that of a run."""

import math

import pytest
import torch

import atoll
from atoll.algorithms.acco import ACCO
from atoll.algorithms.diloco import DiLoCo
from atoll.core.errors import ConfigError
from atoll.core.events import Compared, Computed, Evaluated, Exchanged, RoundFinished, RunFinished, RunStarted, UpdateSkipped
from atoll.core.flat_tree import Tree
from atoll.optim.adam import AdamW
from atoll.optim.sgd import SGD
from atoll.runs.cluster import Cluster
from atoll.telemetry.event_log import read_events
from atoll.telemetry.sinks import MemorySink
from atoll.telemetry.summary import read_summary
from atoll.testing.simulated_runs import Regression, simulate

WORKLOAD = Regression(hidden=3)
DILOCO = DiLoCo(inner_steps=3)


def logged(group, folder, steps):
    """A loop of so many steps per island. Returns the module's weights and the bytes that this process sent."""
    model = WORKLOAD.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with atoll.islands(model, optimizer, DILOCO, out=folder) as islands:
        for step in range(steps[islands.rank]):
            loss = WORKLOAD.loss(model, WORKLOAD.batches.batch(islands.rank, step))
            islands.log(loss.item(), 8)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        islands.finish()
        with torch.no_grad():
            islands.log_evaluation(WORKLOAD.evaluate(model))
    return Tree.of(model), islands.sent_bytes


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def test_exchanges_losses_and_cosines_are_those_of_the_simulator(two, tmp_path):
    found = two.run(logged, str(tmp_path / "log"), (9, 9))
    expected = simulate(DILOCO, steps=9, workload=WORKLOAD, inner=SGD(lr=0.05), cluster=Cluster(islands=2))
    assert all(params.equal(expected.params) for params, _ in found)
    events = list(read_events(tmp_path / "log/events.jsonl"))
    simulated = [event for event in expected.of(Exchanged) if event.what == "mean"]
    exchanged = of(Exchanged, events)[: len(simulated)]
    assert [event.sent_bytes for event in exchanged] == [event.sent_bytes for event in simulated]
    assert all(event.start_s <= event.end_s for event in exchanged)
    for one, other in zip(of(Compared, events), expected.of(Compared), strict=False):
        assert (one.norms, one.cosine_mean) == (pytest.approx(other.norms), pytest.approx(other.cosine_mean))
    rounds = of(RoundFinished, events)
    assert [event.loss for event in rounds[:3]] == pytest.approx([event.loss for event in expected.of(RoundFinished)])
    assert [event.tokens for event in rounds[:3]] == [48, 96, 144]
    (started,), (finished,) = of(RunStarted, events), of(RunFinished, events)
    assert (finished.rounds, finished.outer_steps, finished.steps) == (3, 3, 9), "the exchange that closes the block is no round"
    assert not of(UpdateSkipped, events)
    assert (started.engine, started.algorithm, started.islands) == ("loop", "DiLoCo", 2)
    assert finished.digest == expected.params.digest()
    assert finished.val_loss == of(Evaluated, events)[-1].loss == expected.finished.val_loss
    assert finished.sent_bytes_per_island == sum(sent for _, sent in found) / 2
    summary = read_summary(tmp_path / "log")
    assert summary.overlap is not None
    assert all(island.exchanged_s > 0 and island.computed_s > 0 for island in summary.overlap.islands)


def test_a_last_round_counts_the_steps_that_the_longest_island_took_in_it(two, tmp_path):
    two.run(logged, str(tmp_path / "log"), (7, 8))
    assert [event.steps for event in of(RoundFinished, read_events(tmp_path / "log/events.jsonl"))] == [3, 6, 8]


def test_report_prints_an_own_loop_and_writes_its_trace(tmp_path, capsys):
    from atoll.cli.inspect_commands import report_run

    logged(None, str(tmp_path / "log"), (7,))
    report_run(tmp_path / "log", as_json=False)
    printed = capsys.readouterr().out
    assert "own loop" in printed
    assert "not verified" not in printed
    assert (tmp_path / "log/trace.json").exists()


def test_loops_without_an_evaluation_are_not_compared_as_if_they_had_diverged(tmp_path, capsys):
    from atoll.cli.run_command import compare_runs

    model = WORKLOAD.module()
    with atoll.islands(model, torch.optim.SGD(model.parameters(), lr=0.05), DILOCO, out=tmp_path / "log") as islands:
        WORKLOAD.loss(model, WORKLOAD.batches.batch(0, 0)).backward()
        islands.optimizer.step()
    logged(None, str(tmp_path / "other"), (3,))
    capsys.readouterr()
    with pytest.raises(ConfigError, match=r"log has no evaluation.* islands.log_evaluation"):
        compare_runs(
            [str(tmp_path / "other"), str(tmp_path / "log")],
            [],
            None,
            out=tmp_path / "out",
            as_json=False,
            as_markdown=False,
            quiet=True,
        )
    assert "diverged" not in capsys.readouterr().out


def uneven(group, folder):
    return logged(group, folder, (4, 8))


def test_islands_with_uneven_batches_are_logged_to_the_end(two, tmp_path):
    one, other = two.run(uneven, str(tmp_path / "log"))
    assert one[0].equal(other[0])
    events = list(read_events(tmp_path / "log/events.jsonl"))
    assert sum(event.steps for event in of(Computed, events) if event.island == 0) == 4
    assert sum(event.steps for event in of(Computed, events) if event.island == 1) == 8
    assert len(of(RunFinished, events)) == 1


def test_sinks_receive_the_events_of_an_algorithm_that_steps_by_itself_and_losses_are_optional():
    model, sink = WORKLOAD.module(), MemorySink()
    with atoll.islands(model, None, ACCO(optimizer=AdamW(lr=0.1)), sinks=[sink]) as islands:
        for step in range(6):
            WORKLOAD.loss(model, WORKLOAD.batches.batch(0, step)).backward()
            islands.step(tokens=8)
    assert sum(event.batches for event in sink.of(Computed)) == 6
    assert math.isnan(sink.of(RoundFinished)[0].loss)
    assert math.isnan(sink.of(RunFinished)[0].val_loss)
    assert sink.of(RunFinished)[0].tokens == 48


def test_a_block_that_raises_leaves_an_unfinished_log_and_a_folder_with_contents_is_refused(tmp_path):
    model = WORKLOAD.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(ZeroDivisionError), atoll.islands(model, optimizer, DILOCO, out=tmp_path / "log"):
        raise ZeroDivisionError
    assert not of(RunFinished, read_events(tmp_path / "log/events.jsonl"))
    with pytest.raises(ConfigError, match=r"out=.*log is a folder that is not empty"):
        atoll.islands(model, optimizer, DILOCO, out=tmp_path / "log").__enter__()


def test_the_agreed_weights_can_be_evaluated_in_the_middle_of_a_round_and_not_trained():
    model = WORKLOAD.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with atoll.islands(model, optimizer, DILOCO) as islands:
        start = Tree.of(model)
        WORKLOAD.loss(model, WORKLOAD.batches.batch(0, 0)).backward()
        optimizer.step()
        own = Tree.of(model)
        with islands.agreed():
            assert Tree.of(model).equal(start)
            with pytest.raises(ConfigError, match="the loop stepped inside of"):
                optimizer.step()
        assert Tree.of(model).equal(own)
        assert not own.equal(start)
        islands.finish()
        agreed = Tree.of(model)
        with islands.agreed():
            assert Tree.of(model).equal(agreed)
        islands.finish()
        with pytest.raises(ConfigError, match=r"a step after islands.finish\(\)"):
            optimizer.step()


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))

    def forward(self, inputs):
        return self.net(inputs)


def statistics(group, average, steps):
    """The running means of BatchNorm after a round of each island, the last one of a block, and their step counts."""
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with atoll.islands(model, optimizer, DiLoCo(inner_steps=2), average_buffers=average) as islands:
        for step in range(steps[islands.rank]):
            WORKLOAD.loss(model, WORKLOAD.batches.batch(islands.rank, step)).backward()
            optimizer.step()
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_buffers_stay_the_islands_own_or_are_averaged_as_asked(two):
    one, other = two.run(statistics, False, (2, 2))
    assert not torch.equal(one["net.1.running_mean"], other["net.1.running_mean"])
    mean, same = two.run(statistics, True, (2, 2))
    for name in ("net.1.running_mean", "net.1.running_var"):
        assert torch.equal(mean[name], same[name])
        assert torch.allclose(mean[name], (one[name] + other[name]) / 2)
    alone, idle = two.run(statistics, True, (2, 0))
    assert torch.equal(alone["net.1.running_mean"], idle["net.1.running_mean"])
    assert torch.equal(alone["net.1.running_mean"], one["net.1.running_mean"])
    model = Normed()
    with pytest.raises(ConfigError, match='average_buffers=True with finish="alone"'):
        atoll.islands(model, torch.optim.SGD(model.parameters()), DILOCO, average_buffers=True, finish="alone")
