"""Real islands in network namespaces: one side of a partition goes on, and two islands without a link exchange through a third."""

import json
import subprocess
from contextlib import contextmanager
from itertools import pairwise

import pytest

from atoll.algorithms.diloco import DiLoCo
from atoll.data.text_dataset import Text
from atoll.engines.elastic.spec import Elastic
from atoll.engines.run_lifecycle import run
from atoll.models.gpt import GPT
from atoll.optim.adam import AdamW
from atoll.runs.cluster import Cluster
from atoll.runs.run_settings import Keep, Run, Train
from atoll.testing import network_namespaces
from atoll.testing.chaos.attach_faults import RunFaults
from atoll.testing.chaos.faults import Cut, CutOneWay, FaultScript, TimedFault
from atoll.testing.chaos.reports import elastic_report

pytest.importorskip("torchft")
NO_NAMESPACES = network_namespaces.unavailable_reason()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NO_NAMESPACES is not None, reason=str(NO_NAMESPACES))]


def described(rounds):
    return Run(
        recipe="divided",
        model=GPT(layers=1, width=8, heads=1, head_size=8),
        data=Text(corpus="stdlib", seq_len=16, limit_bytes=60_000, eval_batches=2),
        algorithm=DiLoCo(inner_steps=2),
        optimizer=AdamW(lr=0.01),
        train=Train(steps=2 * rounds, batch_size=2),
        cluster=Cluster(islands=3),
        keep=Keep(evaluate_every=1000, save_every=20),
    )


def chaos_log(folder):
    return [json.loads(line) for line in (folder / "chaos.jsonl").read_text().splitlines()]


def commits(folder):
    """The times of commits on the script's clock, and how many islands had work in each."""
    return [(one["at_s"], one["observed"]["participating"]) for one in chaos_log(folder) if "observed" in one]


def test_the_side_of_the_lighthouse_waits_if_it_is_the_minority_and_all_go_on_when_the_partition_heals(tmp_path):
    folder, said, cut_s = tmp_path / "run", [], 15.0
    cuts = [TimedFault(at_s=2.0, fault=Cut(link=f"island-000{number}", for_s=cut_s)) for number in (1, 2)]
    faults = RunFaults(FaultScript(faults=tuple(cuts)))
    run(described(40), engine=Elastic(processes=3, step_delay=0.2), out=folder, command=["test"], log=said.append, faults=faults)
    assert any("took part in the last commit and cannot be reached" in text for text in said), said
    begins_s = max(one["at_s"] for one in chaos_log(folder) if "injected" in one)
    after = [(at_s, there) for at_s, there in commits(folder) if at_s > begins_s + 1.5]
    assert after[0][0] > begins_s + cut_s, "no side had the majority"
    assert after[-1][1] == 3
    report = elastic_report(folder, units=3 * 40)
    assert (report.data, report.diverged) == ((), ())


def test_a_lighthouse_whose_packets_are_lost_stops_commits_and_all_islands_go_on_when_they_arrive_again(tmp_path):
    folder, said, cut_s = tmp_path / "run", [], 12.0
    cut = TimedFault(at_s=2.0, fault=CutOneWay(link="lighthouse", for_s=cut_s))
    faults = RunFaults(FaultScript(faults=(cut,)))
    run(described(60), engine=Elastic(processes=3, step_delay=0.2), out=folder, command=["test"], log=said.append, faults=faults)
    (begins_s,) = (one["at_s"] for one in chaos_log(folder) if "injected" in one)
    paused = [at_s for at_s, _ in commits(folder) if begins_s + 1.5 < at_s < begins_s + cut_s]
    assert not paused, "no quorum can form"
    after = [(at_s, there) for at_s, there in commits(folder) if at_s > begins_s + cut_s]
    assert after[0][0] < begins_s + cut_s + 30.0
    assert after[-1][1] == 3
    assert not any("island" in text and "has died" in text for text in said), said
    report = elastic_report(folder, units=3 * 60)
    assert (report.data, report.diverged) == ((), ())


class PairCut(RunFaults):
    """Two islands cannot reach each other from `at_s` on; all other links work."""

    at_s, pair = 6.0, ("island-0001", "island-0002")

    @contextmanager
    def attach(self, task):
        with super().attach(task) as hooks:
            inject, cut = hooks.step, []

            def step(now_s, processes):
                inject(now_s, processes)
                if not cut and commits(task.folder.path) and commits(task.folder.path)[-1][0] > self.at_s:
                    cut.append(now_s)
                    one, other = (hooks._namespaces[name][0] for name in self.pair)
                    for here, there in ((one, other), (other, one)):  # packets go to a machine that does not exist
                        entry = f"neigh replace {there.address} lladdr 02:00:00:00:00:99 nud permanent dev {here.device}"
                        subprocess.run(["ip", "-n", here.name, *entry.split()], check=True)

            hooks.step = step
            yield hooks


def test_two_islands_that_cannot_reach_each_other_exchange_through_the_third_and_the_run_keeps_its_pace(tmp_path):
    folder, said = tmp_path / "run", []
    faults = PairCut(FaultScript(faults=(TimedFault(at_s=0.1, fault=Cut(link="island-0000", for_s=0.01)),)))
    run(described(100), engine=Elastic(processes=3, step_delay=0.1), out=folder, command=["test"], log=said.append, faults=faults)
    times = [at_s for at_s, _ in commits(folder)]
    before = [at_s for at_s in times if 1.0 < at_s <= PairCut.at_s]
    pace_s = (before[-1] - before[0]) / (len(before) - 1)
    after = [at_s for at_s in times if at_s > PairCut.at_s]
    longest_s = max(later - one for one, later in pairwise(after))
    lost_s = sum(later - one for one, later in pairwise(after) if later - one > 10 * pace_s)
    rest = len(after) - 1, after[-1] - after[0] - lost_s
    assert rest[1] / rest[0] < 2 * pace_s, "apart from the change of the transport it keeps its pace"
    assert lost_s < 60.0, (lost_s, longest_s)
    assert commits(folder)[-1][1] == 3
    logs = [path.read_text() for path in (folder / "logs").glob("island-*.log")]
    assert sum("cannot be reached from here, and is reached through another island" in text for text in logs) == 2
    assert not any("is evicted" in text for text in logs)
    assert not any("has died" in text for text in said)
    report = elastic_report(folder, units=3 * 100)
    assert (report.data, report.diverged) == ((), ())
