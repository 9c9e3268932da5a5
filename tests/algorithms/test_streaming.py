"""Streaming DiLoCo: identities, fragments that cover the model once, rounds by hand, and several fragments under way."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.algorithms.diloco import DiLoCo
from atoll.algorithms.streaming import Streaming, fragment_ranges
from atoll.core.errors import ConfigError
from atoll.core.events import Exchanged
from atoll.core.flat_tree import Tree
from atoll.core.layout import Layout
from atoll.core.protocols import Mean
from atoll.models.gpt import GPT
from atoll.optim.sgd import SGD, Nesterov
from atoll.runs.cluster import Cluster, Link, Lost
from atoll.testing.fakes import FakeReplica, ScriptedPeers, drive, one_round
from atoll.testing.simulated_runs import simulate

CLUSTER = Cluster(islands=3)


def tree(*values):
    return Tree.of({"w": torch.tensor(values)})


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_one_fragment_without_overlap_is_diloco_to_the_bit(codec):
    outer = Nesterov(lr=0.7, momentum=0.9)
    diloco = simulate(DiLoCo(inner_steps=4, outer=outer, codec=codec), steps=16, cluster=CLUSTER)
    streaming = simulate(Streaming(inner_steps=4, fragments=1, overlap=0, outer=outer, codec=codec), steps=16, cluster=CLUSTER)
    assert streaming.params.same_bits(diloco.params)
    lost = Cluster(islands=3, lost=(Lost(island=1, round=1),))
    assert simulate(Streaming(inner_steps=4, fragments=1, overlap=0, outer=outer), steps=16, cluster=lost).params.same_bits(
        simulate(DiLoCo(inner_steps=4, outer=outer), steps=16, cluster=lost).params
    )


def test_with_all_of_its_own_weights_an_island_ignores_the_agreement():
    def trained(mixing):
        replica = FakeReplica(moves_by=-1.0)
        algorithm = Streaming(inner_steps=4, fragments=2, overlap=1, mixing=mixing, outer=SGD(lr=1.0))
        one_round(algorithm, replica, ScriptedPeers(tree(9.0, 9.0)), params=tree(0.0, 0.0))
        return replica.params()["w"].tolist()

    assert trained(1.0) == [-4.0, -4.0], "four steps of -1, and nothing else"
    assert trained(0.0) != [-4.0, -4.0]


def test_a_round_by_hand():
    """H=4, P=2, tau=1: fragment 0 leaves after step 1 and arrives after 2; fragment 1 leaves after 3 and arrives after 4."""
    replica, peers = FakeReplica(moves_by=-1.0), ScriptedPeers(tree(3.0, 5.0))
    algorithm = Streaming(inner_steps=4, fragments=2, overlap=1, mixing=0.5, outer=SGD(lr=1.0))
    state = one_round(algorithm, replica, peers, params=tree(0.0, 0.0))
    assert [sent["w"].tolist() for sent in peers.sent] == [[1.0], [3.0]], "what each fragment had moved when it left"
    assert state.params["w"].tolist() == [-2.0, -4.0], "minus the means of 1 and 3, and of 3 and 5"
    # Fragment 0 was at -2 when it arrived, was mixed to -2, and took two more steps. Fragment 1 was at -4, mixed with -4.
    assert replica.params()["w"].tolist() == [-4.0, -4.0]
    assert [(steps, work.start, work.schedule, work.before) for steps, work in replica.trained] == [(1, n, n, n) for n in range(4)]


@pytest.mark.parametrize(
    ("settings", "offsets"),
    [
        ({"inner_steps": 8, "fragments": 4, "overlap": 0}, (2, 4, 6, 8)),
        ({"inner_steps": 8, "fragments": 4, "overlap": 2}, (0, 2, 4, 6)),
        ({"inner_steps": 8, "fragments": 4, "overlap": 5}, (0, 2, 4, 6)),
        ({"inner_steps": 8, "fragments": 4, "overlap": 8, "mixing": 0.5}, (0, 2, 4, 6)),
        ({"inner_steps": 10, "fragments": 3, "overlap": 3}, (0, 3, 7)),
        ({"inner_steps": 10, "fragments": 3, "overlap": 4}, (0, 3, 6)),
        ({"inner_steps": 8, "fragments": 1, "overlap": 8, "mixing": 0.5}, (0,)),
        ({"inner_steps": 5, "fragments": 5, "overlap": 5, "mixing": 0.5}, (0, 1, 2, 3, 4)),
    ],
)
def test_fragments_are_sent_once_in_a_round_at_even_distances(settings, offsets):
    algorithm = Streaming(**settings)
    assert algorithm.offsets == offsets
    replica = FakeReplica(moves_by=-1.0)
    peers = ScriptedPeers()
    one_round(algorithm, replica, peers, params=tree(*[0.0] * 10))
    assert sum(steps for steps, _ in replica.trained) == settings["inner_steps"]
    assert [sent["w"][0].item() for sent in peers.sent] == [float(step) for step in offsets]


@pytest.mark.parametrize("split", ["contiguous", "balanced", "strided"])
@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_fragments_cover_the_model_once(split, fragments):
    layout = Tree.of(GPT(layers=4, width=16, heads=2, head_size=8).build(50, 8, 0)).layout
    ranges = fragment_ranges(layout, fragments, split)
    covered = sorted(span for each in ranges for span in each)
    assert covered[0][0] == 0
    assert covered[-1][1] == layout.numel
    assert all(one[1] == two[0] for one, two in itertools.pairwise(covered))
    sizes = [sum(stop - start for start, stop in each) for each in ranges]
    assert len(sizes) == fragments
    if split == "contiguous":
        assert max(sizes) - min(sizes) <= 1


def test_strided_fragments_have_every_other_layer_and_the_embeddings_alone():
    layout = Layout.of({f"blocks.{layer}.w": torch.zeros(2) for layer in range(4)} | {"embedding": torch.zeros(3)})
    assert fragment_ranges(layout, 3, "strided") == (((8, 11),), ((0, 2), (4, 6)), ((2, 4), (6, 8)))


def test_several_fragments_share_the_link_one_after_the_other():
    """A fragment takes 2 s to travel, and islands send one after 0, 1 and 2.5 s: two wait for those before them, and the round of
    4 s for the last."""
    numel = simulate(DiLoCo(inner_steps=1), steps=1).params.numel
    link = Link(latency_s=1.0, bandwidth_mbit_per_s=1e9)  # two islands: a scatter and a gather of one hop each
    cluster = Cluster(islands=2, step_time_s=(0.5,), link=link)
    run = simulate(Streaming(inner_steps=8, fragments=3, overlap=6, split="contiguous"), steps=8, cluster=cluster)
    spans = [(event.start_s, event.end_s) for event in run.events if isinstance(event, Exchanged)]
    assert numel >= 3
    assert len(spans) == 3
    assert all(event.background for event in run.events if isinstance(event, Exchanged))
    assert all(later[0] >= earlier[1] for earlier, later in itertools.pairwise(spans)), "no two use the link at a time"
    assert [start for start, _ in spans] == pytest.approx([0.0, 2.0, 4.0])
    assert run.finished.time_s == pytest.approx(6.0)


def test_a_fragment_is_loaded_overlap_steps_after_it_was_sent_also_in_the_next_round():
    """H=4, P=2, tau=3: fragment 1 is sent after step 2 and loaded after step 1 of the next round, where 4 is -4 - 1."""
    algorithm = Streaming(inner_steps=4, fragments=2, overlap=3, outer=SGD(lr=1.0))
    replica, peers = FakeReplica(moves_by=-1.0), ScriptedPeers()
    state = one_round(algorithm, replica, peers, params=tree(0.0, 0.0))
    assert [sent["w"].item() for sent in peers.sent] == [0.0, 2.0]
    assert state.params["w"].tolist() == [0.0, -2.0], "both outer steps are taken at the end of the round"
    assert state.local["w"].tolist() == [-1.0, -4.0], "fragment 0 was loaded after step 3, and fragment 1 is not yet"
    assert state.unloaded == (1,)
    state = drive(algorithm.round(state, replica, peers))
    assert [sent["w"].item() for sent in peers.sent[2:]] == [1.0, 1.0], "fragment 1: one step after it was loaded as -2"
    assert state.params["w"].tolist() == [-1.0, -3.0]
    assert state.local["w"].tolist() == [-2.0, -5.0]


def test_the_peak_stays_that_of_a_fragment_when_several_travel_at_a_time():
    cluster = Cluster(islands=2, step_time_s=(1.0,), link=Link(latency_s=0.0))
    one, several, all_ = (
        simulate(Streaming(inner_steps=6, fragments=3, overlap=tau, mixing=0.5), steps=18, cluster=cluster).finished
        for tau in (1, 3, 6)
    )
    assert one.busiest_second_bytes == several.busiest_second_bytes == all_.busiest_second_bytes == 8


def test_islands_do_not_wait_for_fragments_that_arrive_in_time():
    link = Link(latency_s=0.4, bandwidth_mbit_per_s=1e9)
    cluster = Cluster(islands=2, step_time_s=(1.0,), link=link)
    waits = simulate(Streaming(inner_steps=4, fragments=2, overlap=0), steps=8, cluster=cluster)
    hides = simulate(Streaming(inner_steps=4, fragments=2, overlap=1), steps=8, cluster=cluster)
    assert hides.finished.time_s == pytest.approx(8.0)
    assert waits.finished.time_s == pytest.approx(8.0 + 4 * 0.8)


def test_the_busiest_second_has_one_fragment_where_diloco_sends_all_of_them():
    cluster = Cluster(islands=2, step_time_s=(1.0,), link=Link(latency_s=0.0))
    peaks = [
        simulate(algorithm, steps=16, cluster=cluster).finished
        for algorithm in (DiLoCo(inner_steps=8), Streaming(inner_steps=8, fragments=2), Streaming(inner_steps=8, fragments=3))
    ]
    assert [one.sent_bytes_per_island for one in peaks] == [peaks[0].sent_bytes_per_island] * 3
    assert [one.busiest_second_bytes for one in peaks] == [24, 12, 8]


def test_an_island_that_missed_its_exchanges_trains_on_with_its_own_weights():
    peers = ScriptedPeers(tree(3.0, 5.0), heard=False)
    algorithm = Streaming(inner_steps=4, fragments=2, overlap=1, outer=SGD(lr=1.0))
    state = one_round(algorithm, FakeReplica(moves_by=-1.0), peers, params=tree(0.0, 0.0))
    assert state.params["w"].tolist() == [0.0, 0.0]
    assert state.local["w"].tolist() == [-4.0, -4.0]


class LargestResult(TorchDispatchMode):
    """Remembers the elements of the largest tensor that torch computed, views left out."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("split", ["contiguous", "balanced"])
def test_agreeing_on_a_fragment_writes_that_fragment_alone_if_the_weights_are_donated(split):
    params = Tree.of({f"w{number}": torch.full((6,), float(number)) for number in range(4)})
    algorithm = Streaming(inner_steps=4, fragments=4, split=split)
    state, fragment = algorithm.init(params, ScriptedPeers()), params.select(fragment_ranges(params.layout, 4, split)[1])
    mean, before = Mean(fragment.zeros() + 1.0, 2.0, True), params.copy()
    expected = algorithm.agreed(state, 1, mean)
    assert state.params.equal(before)
    at = params.flat.data_ptr()
    with LargestResult() as largest:
        found = algorithm.agreed(replace(state, params=params.donate()), 1, mean)
    assert largest.numel == fragment.numel
    assert found.params.flat.data_ptr() == at
    assert found.params.same_bits(expected.params)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fragments": 0}, "at least 1 fragment"),
        ({"fragments": 9}, "a step for each"),
        ({"overlap": 9}, "0 to inner_steps=8"),
        ({"overlap": -1}, "0 to inner_steps=8"),
        ({"overlap": 8}, "these are all of its steps"),
        ({"mixing": 1.5}, "from 0 to 1"),
        ({"feedback": -0.1}, "from 0 to 1"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        Streaming(inner_steps=8, **settings)


def test_a_fragment_without_weights_is_refused():
    with pytest.raises(ConfigError, match="leaves a fragment empty"):
        fragment_ranges(Layout.of({"w": torch.zeros(4)}), 2, "strided")
