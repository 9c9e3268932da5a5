"""Records survive JSON, the clock of a run continues from a saved time, and records of all ranks become events and figures."""

import math

import pytest
import torch

from atoll.core.events import Compared, Computed, Exchanged, RoundFinished, UpdateSkipped
from atoll.core.flat_tree import Tree
from atoll.engines.accounting import ComputeSpan, RunAccounting
from atoll.engines.round_record import DeltaSimilarity, EventAggregator, ExchangeRecord, RoundRecord, WallClock
from atoll.testing.simulated_runs import Recorder

THIRD = 1 / 3


def test_a_record_survives_json():
    record = RoundRecord(
        computed=[ComputeSpan(0.1, 0.1 + THIRD, 3, 3.0, [THIRD], 24, True), ComputeSpan(1.0, 2.0, 0, 0.25, [0.5], 2, False)],
        exchanges=[
            ExchangeRecord("mean", 0.5, 0.75, 40, 16, 2.0, False, [1, 3], True),
            ExchangeRecord("total", 0.8, 0.9, 0, 8, 0.0, True),
        ],
        island_exchanges=[ExchangeRecord("reduce_scatter", 0.2, 0.3, 12, 16, 4.0, True)],
        tokens=26,
        dropped_tokens=2,
        island_updates=3,
        island_skipped=[[0], []],
        similarities=[DeltaSimilarity([[4.0, THIRD], [THIRD, 1.0]], [1.0, 2.5])],
    )
    assert RoundRecord.from_json(record.to_json()) == record
    assert "\n" not in record.to_json()


def test_losses_that_are_not_finite_survive_json():
    record = RoundRecord(computed=[ComputeSpan(0.0, 1.0, 0, 1.0, [loss], 8, False) for loss in (math.nan, math.inf, -math.inf)])
    nan, *others = (span.loss for span in RoundRecord.from_json(record.to_json()).computed)
    assert math.isnan(nan)
    assert others == [math.inf, -math.inf]


def test_a_clock_continues_from_where_it_is_set():
    clock = WallClock()
    assert 0 <= clock.now_s() < 60
    clock.set(1000.0)
    assert 1000 <= clock.now_s() < 1060
    assert clock.now_s() <= clock.now_s()


def test_a_cleared_record_is_empty_and_the_next_round_goes_to_the_same_lists():
    record = RoundRecord(tokens=3)
    add = record.computed.append
    add(ComputeSpan(0.0, 1.0, 1, 1.0, [0.5], 3))
    record.clear()
    assert record == RoundRecord()
    add(ComputeSpan(1.0, 2.0, 1, 1.0, [0.25], 3))
    assert len(record.computed) == 1


def aggregator_of(islands=2, devices=1, *, inside=False):
    accounting, sink = RunAccounting(islands, devices if inside else 0, real=True), Recorder()
    aggregator = EventAggregator(accounting, devices, inside=inside, sink=sink)
    aggregator.start(0.0)
    return aggregator, accounting, sink


def of(sink, kind):
    return [event for event in sink.events if isinstance(event, kind)]


def mean(arrived_s, end_s, sent_bytes=40, **more):
    return ExchangeRecord("mean", arrived_s, end_s, sent_bytes, 16, 2.0, False, **more)


def trained(start_s, end_s, steps=3, tokens=24, loss=0.5):
    return ComputeSpan(start_s, end_s, steps, float(steps), [loss], tokens, True)


def test_an_exchange_starts_when_the_last_rank_arrives_and_ends_when_the_last_one_finishes():
    aggregator, accounting, sink = aggregator_of()
    aggregator.add_round(
        [RoundRecord([trained(0, 1)], [mean(1.0, 3.5)]), RoundRecord([trained(0, 3)], [mean(3.0, 3.25, 44)])], 3, 4.0
    )
    (event,) = of(sink, Exchanged)
    assert (event.islands, event.heard, event.arrived_s) == ([0, 1], [True, True], [1.0, 3.0])
    assert (event.start_s, event.end_s) == (3.0, 3.5)
    assert (event.sent_bytes, event.control_bytes, event.weight) == ([40, 44], [16, 16], 2.0)
    assert [ledger.sent_bytes for ledger in accounting.ledgers] == [40, 44]
    assert [(e.island, e.start_s, e.end_s, e.steps, e.device) for e in of(sink, Computed)] == [
        (0, 0, 1, 3, None),
        (1, 0, 3, 3, None),
    ]


def test_a_queued_exchange_starts_when_every_rank_has_finished_the_one_before():
    """Both fragments were launched at 1 s. The second leaves when the first has arrived, and within one second."""
    aggregator, accounting, sink = aggregator_of()
    flights = [mean(1.0, 2.0, 10), mean(1.0, 3.0, 40, start_s=2.0)]
    later = [mean(1.0, 2.0, 10), mean(1.5, 3.0, 40, start_s=2.25)]
    aggregator.add_round([RoundRecord([], flights), RoundRecord([], later)], 3, 4.0)
    assert [(event.start_s, event.end_s) for event in of(sink, Exchanged)] == [(1.0, 2.0), (2.25, 3.0)]
    assert [ledger.busiest_second_bytes for ledger in accounting.ledgers] == [40, 40]


def test_events_of_a_round_are_ordered_by_their_end():
    aggregator, _, sink = aggregator_of()
    records = [
        RoundRecord([trained(0, 1), trained(2, 3)], [mean(1.0, 2.0), mean(3.0, 5.0)]),
        RoundRecord([trained(0, 1.5), trained(2, 4)], [mean(1.5, 2.0), mean(4.0, 5.0)]),
    ]
    aggregator.add_round(records, 3, 5.5)
    *earlier, last = sink.events
    assert [event.end_s for event in earlier] == sorted(event.end_s for event in earlier)
    assert isinstance(last, RoundFinished)
    assert last.wall_time_s == 5.5
    assert last.virtual_time_s is None


def test_figures_of_a_round_are_sums_over_all_ranks():
    aggregator, accounting, sink = aggregator_of()
    aggregator.add_round(
        [RoundRecord([trained(0, 1)], [mean(1, 2)], tokens=24), RoundRecord([trained(0, 2)], [mean(2, 2)], tokens=20)], 3, 2.0
    )
    aggregator.add_round(
        [RoundRecord([trained(2, 3)], [mean(3, 4)], tokens=24), RoundRecord([trained(2, 4)], [mean(4, 4)], tokens=24)], 6, 4.0
    )
    first, second = of(sink, RoundFinished)
    assert (first.round, first.steps, first.tokens, first.local_updates) == (1, 3, 44, 6)
    assert (second.round, second.steps, second.tokens, second.local_updates) == (2, 6, 92, 12)
    assert second.sent_bytes_per_island == 80
    assert accounting.totals.outer_steps == 2
    assert [ledger.present_s for ledger in accounting.ledgers] == [4.0, 4.0]
    assert [ledger.computed_s for ledger in accounting.ledgers] == [2.0, 4.0]


def test_all_gradients_of_a_round_are_one_update_of_each_island():
    aggregator, _, sink = aggregator_of()
    piece = ComputeSpan(0, 1, 0, 0.5, [0.5], 4, False)
    aggregator.add_round([RoundRecord([piece, piece], [mean(1, 2)]), RoundRecord([piece, piece], [mean(1, 2)])], 1, 2.0)
    (finished,) = of(sink, RoundFinished)
    assert finished.local_updates == 2


def test_a_skipped_update_names_the_islands_whose_gradients_were_not_finite():
    aggregator, accounting, sink = aggregator_of()
    met = ExchangeRecord("reduce_scatter", 1.0, 2.0, 40, 16, 2.0, False, nonfinite=(1,), unusable=True)
    gathered = ExchangeRecord("all_gather", 2.0, 2.5, 40, 0, 0.0, False)
    aggregator.add_round([RoundRecord(exchanges=[met, gathered]), RoundRecord(exchanges=[met, gathered])], 1, 3.0)
    (event,) = of(sink, UpdateSkipped)
    assert (event.round, event.islands, event.wall_time_s, event.inside) == (0, [1], 2.0, None)
    assert (accounting.totals.outer_steps, accounting.totals.version) == (0, 1)


def test_a_skipped_update_names_islands_by_their_numbers_not_their_ranks():
    aggregator, _, sink = aggregator_of(islands=3)
    met = ExchangeRecord("mean", 0.0, 1.0, 0, 0, 0.0, False, nonfinite=(0, 1), unusable=True)
    aggregator.add_round([RoundRecord(exchanges=[met]), RoundRecord(exchanges=[met])], 1, 1.0, islands=[1, 2])
    (event,) = of(sink, UpdateSkipped)
    assert event.islands == [1, 2]


def test_an_unusable_estimate_skips_nothing_if_the_commit_after_it_is_usable():
    aggregator, accounting, sink = aggregator_of()
    bad = ExchangeRecord("reduce_scatter", 1.0, 2.0, 40, 16, 2.0, True, nonfinite=(0,), unusable=True)
    good = ExchangeRecord("reduce_scatter", 2.0, 3.0, 40, 16, 4.0, True)
    aggregator.add_round([RoundRecord(exchanges=[bad, good]), RoundRecord(exchanges=[bad, good])], 1, 3.0)
    assert not of(sink, UpdateSkipped)
    assert accounting.totals.outer_steps == 1


def test_norms_and_cosines_are_those_of_the_whole_trees():
    """Each rank has the inner products over its own slice; their sums are those of the whole trees."""
    generator = torch.Generator().manual_seed(0)
    trees = [Tree.of({"w": torch.randn(11, generator=generator)}) for _ in range(3)]
    weights = (1.0, 0.5, 2.0)
    aggregator, _, sink = aggregator_of(islands=3)
    records = []
    for rank in range(3):
        slices = [tree.shard(rank, 3) for tree in trees]
        products = tuple(tuple(one.dot(two) for two in slices) for one in slices)
        records.append(RoundRecord(similarities=[DeltaSimilarity(products, weights)]))
    aggregator.add_round(records, 1, 1.0)
    (event,) = of(sink, Compared)
    mean_tree = (trees[0] * weights[0] + trees[1] * weights[1] + trees[2] * weights[2]) / sum(weights)
    cosines = [trees[i].dot(trees[j]) / (trees[i].norm() * trees[j].norm()) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert event.norms == pytest.approx([tree.norm() for tree in trees], rel=1e-12)
    assert event.mean_norm == pytest.approx(mean_tree.norm(), rel=1e-6)
    assert event.cosine_mean == pytest.approx(sum(cosines) / 3, rel=1e-12)
    assert event.cosine_std == pytest.approx(torch.tensor(cosines, dtype=torch.float64).std(correction=0).item(), rel=1e-9)


def test_zero_deltas_have_no_cosine():
    aggregator, _, sink = aggregator_of()
    aggregator.add_round(
        [RoundRecord(similarities=[DeltaSimilarity(((0.0, 0.0), (0.0, 4.0)), (1.0, 1.0))]), RoundRecord(similarities=[zeros()])],
        1,
        1.0,
    )
    (event,) = of(sink, Compared)
    assert (event.norms, event.cosine_mean, event.cosine_std) == ([0.0, 2.0], None, None)
    assert event.mean_norm == 1.0


def test_a_delta_of_weight_0_need_not_be_finite():
    """An island whose delta was refused: its products over two slices are infinite with both signs, or NaN."""
    for bad in (math.inf, math.nan):
        aggregator, _, sink = aggregator_of()
        slices = [((9.0, sign * bad), (sign * bad, bad)) for sign in (1, -1)]
        aggregator.add_round([RoundRecord(similarities=[DeltaSimilarity(products, (1.0, 0.0))]) for products in slices], 1, 1.0)
        (event,) = of(sink, Compared)
        assert event.mean_norm == event.norms[0] == math.sqrt(18)
        assert not math.isfinite(event.norms[1])
        assert event.cosine_mean is None


def test_a_mean_that_is_not_finite_has_no_norm():
    aggregator, _, sink = aggregator_of()
    slices = [((9.0, sign * math.inf), (sign * math.inf, math.inf)) for sign in (1, -1)]
    aggregator.add_round([RoundRecord(similarities=[DeltaSimilarity(products, (1.0, 1.0))]) for products in slices], 1, 1.0)
    (event,) = of(sink, Compared)
    assert math.isnan(event.mean_norm)


def zeros():
    return DeltaSimilarity(((0.0, 0.0), (0.0, 0.0)), (1.0, 1.0))


def test_a_nan_loss_is_reported_as_it_is():
    aggregator, _, sink = aggregator_of()
    aggregator.add_round([RoundRecord([ComputeSpan(0, 1, 0, 1.0, [math.nan], 8, False)]), RoundRecord()], 1, 1.0)
    (computed,), (finished,) = of(sink, Computed), of(sink, RoundFinished)
    assert math.isnan(computed.loss)
    assert math.isnan(finished.loss)


def test_devices_exchange_inside_their_island_and_with_their_counterparts():
    aggregator, accounting, sink = aggregator_of(islands=2, devices=2, inside=True)
    within = [ExchangeRecord("mean", 0.5 + 0.1 * rank, 0.9, 10 + rank, 16, 2.0, False) for rank in range(4)]
    across = [mean(1.0 + 0.1 * rank, 2.0, 20 + rank) for rank in range(4)]
    records = [
        RoundRecord([trained(0, 1, 0)], [across[r]], [within[r]], tokens=8, dropped_tokens=r, island_updates=3, island_skipped=[])
        for r in range(4)
    ]
    for record in records[2:]:
        record.island_skipped.append((1,))
    aggregator.add_round(records, 3, 2.0)
    between, first, second = sorted(of(sink, Exchanged), key=lambda e: -1 if e.inside is None else e.inside)
    assert (between.inside, between.islands, between.sent_bytes) == (None, [0, 1], [41, 45])
    assert between.arrived_s == [1.1, 1.3]
    assert (first.inside, first.islands, first.sent_bytes) == (0, [0, 1], [10, 11])
    assert (second.inside, second.sent_bytes) == (1, [12, 13])
    assert [(e.island, e.device) for e in of(sink, Computed)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    (skipped,) = of(sink, UpdateSkipped)
    assert (skipped.inside, skipped.islands) == (1, [1])
    (finished,) = of(sink, RoundFinished)
    assert (finished.islands, finished.tokens, finished.local_updates) == (2, 32, 12)
    assert accounting.totals.dropped_tokens == 6
    assert [[ledger.sent_bytes for ledger in devices] for devices in accounting.device_ledgers] == [[10, 11], [12, 13]]
