"""Storages are seen when they are born, and missed when they die."""

import torch

from atoll.testing.storage_tracker import Storages


def test_views_are_no_storages():
    with Storages() as storages:
        whole = torch.zeros(100)
        views = [whole[:50], whole.view(10, 10)]
    assert storages.live_bytes == 400
    assert len(views) == 2


def test_what_died_in_between_counts_in_the_peak_alone():
    with Storages() as storages:
        kept = torch.ones(10)
        total = float((kept + 1).sum())
    assert storages.live_bytes == 40
    assert storages.peak_bytes == 40 + 40 + 4
    assert total == 20.0


def test_what_is_apart_is_not_in_the_peak():
    with Storages() as storages:
        with storages.apart():
            large = torch.zeros(1000)
        small = torch.zeros(1)
    assert (storages.peak_bytes, storages.apart_peak_bytes) == (4, 4000)
    assert large.numel() > small.numel()


def test_what_lives_on_over_a_wait_is_not_passing():
    with Storages() as storages:
        kept = torch.zeros(8)
        storages.wait()
        passing = kept + 1
        del passing, kept
    assert [record.num_bytes for record in storages.passed] == [32]
    assert list(storages.most_passing().values()) == [32]
