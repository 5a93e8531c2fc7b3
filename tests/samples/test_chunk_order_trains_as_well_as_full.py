"""Samples stored sorted by class train as well from the chunk order as fully shuffled (DLFS, figure 13)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.samples_accuracy import Digits, Result, Way, digits, measure, pack_digits, ways
from penstock.samples.store import mount

SEEDS = range(3)
SHARE = 0.25  # of the store's chunks, that the cache holds


@pytest.fixture(scope="module")
def data() -> Digits:
    return digits()


@pytest.fixture(scope="module")
def store(data: Digits, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_digits(data, tmp_path_factory.mktemp("digits") / "store")


@pytest.fixture(scope="module")
def results(store: Path, data: Digits) -> dict[str, Result]:
    with mount(store, "full") as mounted:
        chunks = len(mounted.firsts) - 1
    wanted: list[Way] = ways(chunks, [SHARE])
    return {way.order: measure(store, way, data, SEEDS) for way in wanted}


def test_chunks_hold_one_class_or_two(store: Path) -> None:
    with mount(store, "full") as mounted:
        assert mounted.labels is not None
        bounds = mounted.firsts.astype(int).tolist()
        classes = [len(set(mounted.labels[a:b].tolist())) for a, b in pairwise(bounds)]
    assert len(classes) > 160 and max(classes) == 2 and classes.count(1) > 150


def test_stored_order_trains_badly(results: dict[str, Result]) -> None:
    assert max(results["stored"].accuracies) < 0.6


def test_full_order_trains_as_a_shuffle_in_memory(results: dict[str, Result]) -> None:
    assert results["full"].mean > 0.95
    assert abs(results["full"].mean - results["torch"].mean) < 0.015


def test_chunk_order_with_a_small_cache_trains_as_full(results: dict[str, Result]) -> None:
    assert results["chunk"].slots < 45
    assert abs(results["chunk"].mean - results["full"].mean) < 0.015
    assert min(results["chunk"].accuracies) > 0.95
