"""The header of a checkpoint says what was written, or the file is refused: nothing in it is believed."""

from __future__ import annotations

import json
import re
import struct
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from penstock.checkpoint.header import (
    ITEM_BYTES,
    MAX_TEXT_BYTES,
    RESERVED_KEYS,
    Header,
    TensorEntry,
    decode,
    encode,
    header_bytes,
)
from penstock.errors import InvalidArgument, InvalidFile
from tests.support.headers import FILE, HOSTILE, ONE, ONE_TENSOR, ONLY_OURS, hostile, laid_out, plain, sealed

TENSORS = laid_out(
    ("h.0.weight", "F32", (2, 3)), ("h.0.bias", "BF16", (3,)), ("none", "I64", (0, 4)), ("step", "U8", ())
)
HEADERS = {
    "several tensors": encode(TENSORS, tree='{"h":1}', metadata={"by": "us"}, alignment_bytes=64),
    "nothing": encode([], tree="{}", alignment_bytes=8),
    "no tree": encode(TENSORS[:1], tree=None, alignment_bytes=1),
    "quotes": encode(TENSORS, tree='{"a\\"b":"\\\\"}', metadata={"": "", '"': '\\"'}, alignment_bytes=512),
}


def data_bytes(header: bytes) -> int:
    """What the entries of a good header cover."""
    entries = json.loads(header[8:])
    entries.pop("__metadata__")
    return max((entry["data_offsets"][1] for entry in entries.values()), default=0)


def text_of(header: bytes) -> str:
    return header[8:].decode()


def read(header: bytes, more_bytes: int = 0) -> Header:
    return decode(header, len(header) + more_bytes, FILE)


def refusal(header: bytes, more_bytes: int = 0) -> str:
    with pytest.raises(InvalidFile) as caught:
        read(header, more_bytes)
    message = str(caught.value)
    assert FILE in message
    assert len(message) < 1500
    return message


def library_reads(header: bytes, more_bytes: int) -> bool:
    try:
        deserialize(header + bytes(more_bytes))
    except SafetensorError:
        return False
    return True


names = st.text(max_size=12).filter(lambda name: name != "__metadata__") | st.sampled_from(
    ['"', "\\", "\0", "é/😀"]
)
texts = st.text(max_size=20)


@st.composite
def entry_lists(draw: st.DrawFn) -> list[TensorEntry]:
    keys = draw(st.lists(names, unique=True, max_size=6))
    dtypes = st.sampled_from(sorted(set(ITEM_BYTES)))
    shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
    tensors = [(key, draw(dtypes), draw(shapes)) for key in keys]
    return laid_out(
        *((key, dtype, shape or (2,) if dtype == "F4" else shape) for key, dtype, shape in tensors)
    )


# What is written is read.


@given(entry_lists(), st.none() | texts, st.dictionaries(texts, texts, max_size=3), st.integers(1, 5000))
def test_a_header_comes_back_and_the_library_reads_it(
    entries: list[TensorEntry], tree: str | None, metadata: dict[str, str], alignment_bytes: int
) -> None:
    header = encode(entries, tree=tree, metadata=metadata, alignment_bytes=alignment_bytes)
    size = entries[-1].end if entries else 0
    assert len(header) % alignment_bytes == 0
    assert header_bytes(header[:8], len(header) + size, FILE) == len(header)
    decoded = read(header, size)
    assert decoded == Header(tuple(entries), metadata, tree, len(header), True)
    found = {name: (view["dtype"], len(view["data"])) for name, view in deserialize(header + bytes(size))}
    assert found == {entry.name: (entry.dtype, entry.end - entry.begin) for entry in entries}


def test_the_library_gets_every_tensor_at_its_place() -> None:
    header = HEADERS["several tensors"]
    data = bytes(range(31))
    views = dict(deserialize(header + data))
    for entry in TENSORS:
        assert views[entry.name]["data"] == data[entry.begin : entry.end]
        assert tuple(views[entry.name]["shape"]) == entry.shape


def test_the_size_is_known_before_the_checksums_are() -> None:
    without = [entry._replace(crc32c=None) for entry in TENSORS]
    assert len(encode(without, tree="{}")) == len(encode(TENSORS, tree="{}")) == 4096


@given(entry_lists(), st.dictionaries(texts, texts, max_size=2))
def test_what_the_library_writes_is_read_without_checksums(
    entries: list[TensorEntry], metadata: dict[str, str]
) -> None:
    by_torch = {"F8_E4M3": "float8_e4m3fn", "F32": "float32", "I64": "int64", "BOOL": "bool"}
    kept = [entry for entry in entries if entry.dtype in by_torch]
    buffer = np.zeros(8000, np.uint8)
    written = serialize(
        {
            entry.name: TensorSpec(
                dtype=by_torch[entry.dtype],
                shape=list(entry.shape),
                data_ptr=buffer.ctypes.data,
                data_len=entry.end - entry.begin,
            )
            for entry in kept
        },
        metadata or None,  # with neither tensors nor metadata the library writes what is no JSON
    )
    length = header_bytes(written[:8], len(written), FILE)
    header = decode(written[:length], len(written), FILE)
    assert {(e.name, e.dtype, e.shape, e.end - e.begin) for e in header.entries} == {
        (e.name, e.dtype, e.shape, e.end - e.begin) for e in kept
    }
    assert [entry.crc32c for entry in header.entries] == [None] * len(kept)
    assert (header.metadata, header.tree, header.written_by_penstock) == (metadata, None, False)


def test_other_writers_may_use_another_order_and_more_space() -> None:
    text = b""" {"b" : {"data_offsets": [ 4 ,\n8],"shape":[ ], "dtype":"F32"} ,
        "a":{"shape":[1, 4],"dtype":"U8","data_offsets":[0,4]},"__metadata__":null} \t"""
    header = read(plain(text), 8)
    assert header.entries == (TensorEntry("a", "U8", (1, 4), 0, 4), TensorEntry("b", "F32", (), 4, 8))
    assert library_reads(plain(text), 8)


def test_packed_fours_count_as_pairs() -> None:
    text = b'{"a":{"dtype":"F4","shape":[3,8],"data_offsets":[0,12]}}'
    assert read(plain(text), 12).entries == (TensorEntry("a", "F4", (3, 4), 0, 12),)
    assert b'"shape":[3,8]' in encode(laid_out(("a", "F4", (3, 4))), tree=None)


# What was changed is refused.


@pytest.mark.parametrize("name", HEADERS)
def test_every_changed_byte_is_refused(name: str) -> None:
    header = HEADERS[name]
    more = data_bytes(header)
    read(header, more)
    for at in range(len(header)):
        for bit in range(8):
            changed = bytearray(header)
            changed[at] ^= 1 << bit
            with pytest.raises(InvalidFile):
                # The reader takes as many bytes as the length says.
                whole = bytes(changed) + bytes(more)
                decode(whole[: header_bytes(whole[:8], len(whole), FILE)], len(whole), FILE)


@given(st.sampled_from(sorted(HEADERS)), st.data())
def test_any_change_is_refused(name: str, data: st.DataObject) -> None:
    header = HEADERS[name]
    begin = data.draw(st.integers(0, len(header)))
    end = data.draw(st.integers(begin, min(begin + 40, len(header))))
    changed = header[:begin] + data.draw(st.binary(max_size=40)) + header[end:] + bytes(data_bytes(header))
    if changed[: len(header)] == header:
        return
    with pytest.raises(InvalidFile):
        decode(changed[: header_bytes(changed[:8], len(changed), FILE)], len(changed), FILE)


@pytest.mark.parametrize("name", HEADERS)
def test_every_truncation_and_every_addition_is_refused(name: str) -> None:
    header = HEADERS[name]
    more = data_bytes(header)
    for size in range(len(header) + more):
        there = header[:size]
        with pytest.raises(InvalidFile, match=r"cut short|is empty or") as caught:
            decode(there, size, FILE)
        assert FILE in str(caught.value)
    assert "follow the data" in refusal(header, more + 1)
    for size in range(8):
        with pytest.raises(InvalidFile, match=f"has {size} bytes"):
            header_bytes(header[:size], size, FILE)


def test_a_file_that_lost_its_data_names_the_first_tensor_that_is_not_whole() -> None:
    message = refusal(HEADERS["several tensors"], 25)
    assert "'h.0.bias'" in message and "25 of 31 bytes" in message


@pytest.mark.parametrize("key", RESERVED_KEYS)
def test_a_mark_of_penstock_on_another_header_is_refused(key: str) -> None:
    text = json.dumps({"__metadata__": {"format": "pt", key: "1"}}).encode()
    assert "is damaged: penstock wrote it" in refusal(plain(text))


def test_a_name_that_is_like_a_mark_is_only_a_name() -> None:
    text = b'{"penstock.tree":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"__metadata__":{"x.tree":"{}"}}'
    header = read(plain(text), 1)
    assert header.tree is None and header.entries[0].name == "penstock.tree"


def test_a_later_format_asks_for_an_update() -> None:
    later = text_of(HEADERS["nothing"]).replace('"penstock.format":"1"', '"penstock.format":"2"')
    assert "update penstock" in refusal(sealed(later))


@pytest.mark.parametrize(
    "found", ["", "0123456", "0123456g", "0123456A", "01234567 ", "01234567 01234567", " 1234567"]
)
def test_checksums_that_are_none_are_refused_though_the_header_has_its_own(found: str) -> None:
    good = text_of(HEADERS["no tree"])
    assert read(sealed(good), 24).entries == (TENSORS[0],)
    bad = re.sub(r'"penstock.crc32c":"\w*"', f'"penstock.crc32c":"{found}"', good)
    assert "not 1 checksums" in refusal(sealed(bad), 24)


# What cannot be is refused.


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_is_refused(name: str) -> None:
    text, more = hostile(name)
    header = plain(text)
    message = refusal(header, more)
    assert library_reads(header, more) == (name in ONLY_OURS)
    if name in ONE_TENSOR:
        assert "ensor 'a'" in message


@pytest.mark.parametrize("name", [name for name in HOSTILE if str(HOSTILE[name][0]).startswith('{"a')])
def test_what_cannot_be_is_refused_under_the_right_checksum(name: str) -> None:
    text, more = hostile(name)
    marks = f'{{"__metadata__":{{"penstock.header_crc32c":"{"0" * 8}","penstock.format":"1"}},'
    refusal(sealed(marks + text[1:].decode()), more)


@pytest.mark.parametrize(
    "length", [2, MAX_TEXT_BYTES, MAX_TEXT_BYTES + 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1]
)
def test_no_length_makes_it_read_beyond_the_file(length: int) -> None:
    beginning = struct.pack("<Q", length) + b"{"
    with pytest.raises(InvalidFile, match=FILE):
        header_bytes(beginning[:8], 9, FILE)
    with pytest.raises(InvalidFile, match=FILE):
        decode(beginning, 9, FILE)


def test_the_largest_header_is_read_and_a_larger_one_is_not() -> None:
    beginning = struct.pack("<Q", MAX_TEXT_BYTES)
    assert header_bytes(beginning, 1 << 40, FILE) == MAX_TEXT_BYTES + 8
    with pytest.raises(InvalidFile, match="allows"):
        header_bytes(struct.pack("<Q", MAX_TEXT_BYTES + 1), 1 << 40, FILE)


@pytest.mark.parametrize("name", ["a product of 2**64", "deep objects", "deep lists", "a huge size"])
def test_a_refusal_takes_little_memory(name: str) -> None:
    text, more = hostile(name)
    header = plain(text)
    tracemalloc.start()
    refusal(header, more)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * len(header) + 100_000


@given(st.binary(max_size=200), st.integers(0, 300))
def test_random_bytes_are_refused(data: bytes, more: int) -> None:
    with pytest.raises(InvalidFile):
        decode(data, len(data) + more, FILE)


PIECES = ["{", "}", "[", "]", ",", ":", '"', "\\", "0", "1", "2", "-", ".", "e", " ", "null", "true", '""']
PIECES += ['"dtype":"U8"', '"shape":[1]', '"data_offsets":[0,1]', '"__metadata__"', ONE, f'"b":{ONE}', '"a"']
pieces = st.sampled_from(PIECES)
PLAIN = (
    '{"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    '"b":{"dtype":"F16","shape":[2,1],"data_offsets":[1,5]}}'
)


@st.composite
def mutations(draw: st.DrawFn) -> str:
    """A plain header's text in which some parts were replaced by other likely ones."""
    text = PLAIN
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, len(text)))
        end = draw(st.integers(begin, min(len(text), begin + 12)))
        text = text[:begin] + draw(pieces | st.just("")) + text[end:]
    return text


def assert_no_more_lenient_than_the_library(text: str, more: int) -> None:
    header = plain(text.encode())
    try:
        entries: Sequence[TensorEntry] | None = read(header, more).entries
    except InvalidFile:
        entries = None
    if entries is not None:
        data = bytes(range(more))
        views: dict[str, Any] = dict(deserialize(header + data))
        assert set(views) == {entry.name for entry in entries}
        for entry in entries:
            assert views[entry.name]["dtype"] == entry.dtype
            assert tuple(views[entry.name]["shape"]) == entry.shape
            assert views[entry.name]["data"] == data[entry.begin : entry.end]


@settings(max_examples=600)
@given(mutations(), st.sampled_from([5, 5, 5, 1, 0, 6]))
def test_what_the_library_refuses_is_refused(text: str, more: int) -> None:
    assert_no_more_lenient_than_the_library(text, more)


@settings(max_examples=300)
@given(st.lists(pieces, max_size=12).map("".join), st.integers(0, 2))
def test_no_text_is_read_that_the_library_refuses(text: str, more: int) -> None:
    assert_no_more_lenient_than_the_library(text, more)


# What cannot be written is refused.


@pytest.mark.parametrize(
    "metadata",
    [{"a": 1}, {1: "a"}, {"penstock.tree": "{}"}, {"penstock.format": "1"}, {"a": "\ud800"}, {"\udc00": ""}],
)
def test_metadata_that_cannot_be_written_is_refused(metadata: Any) -> None:
    with pytest.raises(InvalidArgument, match="cannot be saved"):
        encode([], tree="{}", metadata=metadata)


def test_a_header_that_no_reader_takes_is_not_written() -> None:
    with pytest.raises(InvalidArgument, match="allows 100000000"):
        encode(TENSORS, tree="x" * MAX_TEXT_BYTES)
