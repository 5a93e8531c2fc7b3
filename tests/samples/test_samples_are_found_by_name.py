"""Every name finds its sample, other names find none, and damaged files are refused rather than believed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock._native import SampleNames
from penstock.samples.builder import Block, Builder, lookup_of
from tests.support.stores import key_of

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]  # directory, names, anchors
KEYS = np.uint64((1 << 48) - 1)
many_names = st.lists(st.binary(min_size=1, max_size=40), max_size=200, unique=True)


def joined(parts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    return np.frombuffer(b"".join(parts), np.uint8), np.cumsum([len(part) for part in parts], dtype=np.int64)


def arrays_of(names: list[bytes]) -> Arrays:
    builder = Builder(4096, 1 << 40)
    builder.add_many(Block(*joined(names), np.empty(0, np.uint8), np.zeros(len(names), np.int64)))
    builder.finish()
    _, files = builder.take()
    directory = np.frombuffer(files["directory.bin"], np.uint64).reshape(-1, 2)
    names, anchors = files["names.bin"], files["anchors.bin"]
    return directory, np.frombuffer(names, np.uint8), np.frombuffer(anchors, np.uint64)


def with_key(directory: np.ndarray, index: int, key: int) -> np.ndarray:
    """The directory, where one sample has another key than its name's."""
    changed = directory.copy()
    changed[index, 0] = changed[index, 0] & ~KEYS | np.uint64(key)
    return changed


def opened(names: list[bytes]) -> SampleNames:
    arrays = arrays_of(names)
    lookup, twins = lookup_of(*arrays)
    assert twins is None
    return SampleNames(*arrays, lookup)


@given(many_names, many_names)
@example([b"%d" % i for i in range(3000)], [b"%d" % i for i in range(2990, 3100)])
def test_names_find_their_samples_and_no_others(names: list[bytes], others: list[bytes]) -> None:
    found = opened(names)
    indices = {name: index for index, name in enumerate(names)}
    wanted = names + others
    expected = [indices.get(name, -1) for name in wanted]
    assert [found.find(name) for name in wanted] == expected
    many = found.find_many(*joined(wanted))
    assert many.dtype == np.int64
    assert many.tolist() == expected
    assert found.names(0, len(names)) == names
    assert [found.name(index) for index in range(len(names))] == names
    assert found.names(len(names) // 3, len(names) // 2) == names[len(names) // 3 : len(names) // 2]


def test_unicode_names_keep_their_bytes() -> None:
    names = ["Ä/ö.png", "A\u0308/o\u0308.png", "日本語", "🙂" * 100, " ", "\0", "\ud800"]
    encoded = [name.encode("utf-8", "surrogatepass") for name in names] + [b"\xff\xfe not UTF-8"]
    found = opened(encoded)
    assert found.names(0, len(encoded)) == encoded
    assert [found.find(name) for name in encoded] == list(range(len(encoded)))


def test_the_longest_names_are_found() -> None:
    names = [bytes([i]) * 65535 for i in range(40)]
    found = opened(names)
    assert found.find_many(*joined(names)).tolist() == list(range(40))
    assert found.find(names[0][:-1]) == -1


def test_an_empty_name_is_nobodys() -> None:
    found = opened([b"a", b"b"])
    assert found.find(b"") == -1
    assert found.find_many(*joined([b"", b"b", b""])).tolist() == [-1, 1, -1]


def test_two_names_of_one_key_are_told_apart() -> None:
    names = [b"%d" % i for i in range(100)]
    directory, bytes_, anchors = arrays_of(names)
    for index in (3, 20, 21, 90):  # from now on they collide with number 50
        directory = with_key(directory, index, key_of(names[50]))
    lookup, twins = lookup_of(directory, bytes_, anchors)
    assert twins is None
    found = SampleNames(directory, bytes_, anchors, lookup)
    assert found.find(names[50]) == 50
    assert found.find_many(*joined(names[45:55])).tolist() == list(range(45, 55))


@pytest.mark.parametrize("count", [2, 20, 3000])
def test_keys_that_all_collide_take_no_longer_than_sorting(count: int) -> None:
    names = [b"%d" % i for i in range(count)]
    directory, bytes_, anchors = arrays_of(names)
    directory = directory & ~np.array([KEYS, 0], np.uint64) | np.array([key_of(b"7"), 0], np.uint64)
    lookup, twins = lookup_of(directory, bytes_, anchors)
    assert twins is None
    assert SampleNames(directory, bytes_, anchors, lookup).find(b"7") == (7 if count > 7 else -1)
    arrays = arrays_of([*names, b"1"])
    directory = arrays[0] & ~np.array([KEYS, 0], np.uint64)
    assert lookup_of(directory, *arrays[1:])[1] == (1, count, "1")


@given(st.lists(st.binary(min_size=1, max_size=2), min_size=1, max_size=100))
def test_two_samples_of_one_name_are_noticed(names: list[bytes]) -> None:
    _, twins = lookup_of(*arrays_of(names))
    assert (twins is None) == (len(set(names)) == len(names))
    if twins is not None:
        assert twins[0] < twins[1]
        assert names[twins[0]] == names[twins[1]]


@settings(max_examples=300)
@given(st.integers(0, 60), st.data())
def test_damaged_arrays_are_refused_or_harmless(count: int, data: st.DataObject) -> None:
    """What is found of intact names may be wrong; memory outside of the arrays is never read."""
    names = [b"name %d" % i for i in range(count)]
    arrays = arrays_of(names)
    damaged = [array.copy() for array in (*arrays, lookup_of(*arrays)[0])]
    for _ in range(data.draw(st.integers(1, 8))):
        target = damaged[data.draw(st.integers(0, 3))].reshape(-1).view(np.uint8)
        if target.size:
            target[data.draw(st.integers(0, target.size - 1))] = data.draw(st.integers(0, 255))
    found = SampleNames(*damaged)
    for act in (
        lambda: [found.find(name) for name in names],
        lambda: found.find_many(*joined(names)),
        lambda: found.names(0, count),
        lambda: [found.name(index) for index in range(count)],
        lambda: lookup_of(*damaged[:3]),
    ):
        try:
            act()
        except ValueError as error:
            assert "damaged" in str(error)


@pytest.mark.parametrize("which", [0, 1, 2, 3])
@pytest.mark.parametrize("keep", [0, -1])
def test_arrays_of_other_sizes_are_refused(which: int, keep: int) -> None:
    arrays = arrays_of([b"%d" % i for i in range(33)])
    parts = [*arrays, lookup_of(*arrays)[0]]
    parts[which] = parts[which][:keep]
    with pytest.raises(ValueError, match="damaged"):
        SampleNames(*parts).names(0, 33 if which else 32)


def test_indices_outside_of_the_store_are_refused() -> None:
    found = opened([b"a", b"b"])
    for index in (-1, 2, 1 << 40):
        with pytest.raises(IndexError):
            found.name(index)
    for begin, end in ((-1, 1), (1, 0), (0, 3)):
        with pytest.raises(IndexError):
            found.names(begin, end)
    assert found.names(2, 2) == []


@pytest.mark.parametrize("ends", [[2, 1], [-1, 2], [1, 4]])
def test_ends_of_wanted_names_must_ascend(ends: list[int]) -> None:
    with pytest.raises(ValueError, match="ends"):
        opened([b"a"]).find_many(np.frombuffer(b"abc", np.uint8), np.array(ends, np.int64))


def test_the_arrays_live_as_long_as_they_are_needed() -> None:
    found = opened([b"%d" % i for i in range(1000)])
    assert found.find(b"999") == 999
