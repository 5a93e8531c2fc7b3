"""`penstock.samples.info` counts sizes, edges and classes as a plain loop over the samples does."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidArgument, SampleError
from penstock.samples import inspection
from penstock.samples.inspection import info
from tests.support.stores import write_store

CHUNK_BYTES = 4096
LARGE = (1 << 23) - 1

quick = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
SIZES = st.one_of(st.integers(0, 10), st.sampled_from([1023, 1024, 1025, 4096]), st.integers(0, 9000))


def crossing(sizes: list[int], data_file_bytes: int) -> list[int]:
    """Sizes of the samples that cross the end of their chunk."""
    found, offset = [], 0
    for number, size in enumerate(sizes):
        if number and offset + size > data_file_bytes:
            offset = 0
        if offset % CHUNK_BYTES + size > CHUNK_BYTES:
            found.append(size)
        offset += size
    return found


@quick
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=40), data_file_bytes=st.integers(9000, 40_000), data=st.data()
)
def test_one_store(sizes: list[int], data_file_bytes: int, data: st.DataObject, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
    labels = data.draw(st.lists(st.integers(-1, 2), min_size=len(sizes), max_size=len(sizes)))
    samples = [(str(i), b"x" * size) for i, size in enumerate(sizes)]
    classes = ["a", "b", "c"]
    write_store(tmp_path / "store", samples, data_file_bytes=data_file_bytes, labels=labels, classes=classes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspection, "ENTRIES_AT_ONCE", 7)
        found = info(tmp_path / "store", cache_bytes=[])
    assert found.samples == len(sizes) and found.size_bytes == sum(sizes)
    edges = crossing(sizes, data_file_bytes)
    assert found.edges == len(edges)
    assert found.long_edges == sum(size >= CHUNK_BYTES // 4 for size in edges)
    assert found.sizes is not None
    assert (found.sizes.smallest_bytes, found.sizes.largest_bytes) == (min(sizes), max(sizes))
    ordered = sorted(sizes)
    for share, size in found.sizes.quantiles:
        assert size == ordered[max(0, -int(-share * len(sizes) // 1) - 1)]
    for span in found.sizes.ranges:
        assert span.samples == sum(span.begin_bytes <= size < span.end_bytes for size in sizes)
    assert sum(span.samples for span in found.sizes.ranges) == len(sizes)
    counts = Counter(labels)
    expected = [(name, counts[label]) for label, name in enumerate(classes)]
    expected += [(None, counts[-1])] if counts[-1] else []
    assert [(one.name, one.samples) for one in found.classes] == expected
    stored_bytes = sum(file.stat().st_size for file in (tmp_path / "store").iterdir())
    assert found.overhead_bytes == stored_bytes - found.size_bytes


def test_large_samples_count_with_their_true_size(tmp_path: Path) -> None:
    samples = [("small", b"x"), ("large", bytes(LARGE + 5)), ("last", b"y")]
    write_store(tmp_path / "store", samples, chunk_bytes=1 << 20)
    found = info(tmp_path / "store")
    assert found.sizes is not None and found.sizes.largest_bytes == LARGE + 5
    assert found.edges == found.long_edges == 1


def test_parts_are_counted_together(tmp_path: Path) -> None:
    for partition in range(3):
        samples = [(f"{partition}-{i}", b"x" * (partition + 1)) for i in range(10)]
        folder = tmp_path / f"part-0000{partition}-of-00003"
        write_store(
            folder,
            samples,
            part=partition,
            parts=3,
            labels=[partition % 2] * 10,
            classes=["a", "b"],
        )
    found = info(tmp_path, batch=4)
    assert (found.partitions, found.samples, found.chunks, found.data_files) == (3, 30, 3, 3)
    assert [(one.name, one.samples) for one in found.classes] == [("a", 20), ("b", 10)]
    assert found.sizes is not None and found.sizes.mean_bytes == 2
    # Three chunks, all in the smallest cache.
    assert [row.order for row in found.mixing] == ["chunk", "full"]
    assert found.mixing[0].slots == 3 and found.mixing[0].mixing.ratio > 0.9


def test_a_batch_of_nothing_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path / "store", [("a", b"x")])
    with pytest.raises(InvalidArgument, match="give 1 or more"):
        info(tmp_path / "store", batch=0)
    with pytest.raises(SampleError, match="is not a sample store"):
        info(tmp_path)
