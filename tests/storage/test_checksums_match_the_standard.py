"""CRC-32C as RFC 3720 defines it: in one piece, in many, at any address, and while copying."""

from __future__ import annotations

import ctypes
import random
import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.storage.aligned import AlignedBuffer
from penstock.storage.checksum import copy_crc32c, crc32c, crc32c_at, crc32c_combine

# RFC 3720 appendix B.4, and the check value of "123456789" that catalogues of CRCs give.
VECTORS = [
    (b"", 0x00000000),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(reversed(range(32))), 0x113FDB5C),
    (
        bytes.fromhex(
            "01c00000 00000000 00000000 00000000 14000000 00000400"
            "00000014 00000018 28000000 00000000 02000000 00000000"
        ),
        0xD9963A56,
    ),
    (b"123456789", 0xE3069283),
]

# Around every step of every kernel: words, registers, streams, and copies that bypass the cache.
SIZES = [1, 7, 8, 9, 63, 64, 65, 255, 256, 257, 511, 512, 1535, 1536, 1537, 6143, 6144, 6145, 100_003]
STREAMED = [(256 << 10) - 1, 256 << 10, (256 << 10) + 1, (1 << 20) + 77]


def bitwise(data: bytes, crc: int = 0) -> int:
    """The definition, a bit at a time."""
    register = crc ^ 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def random_bytes(size_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def address_of(buffer: ctypes.Array[ctypes.c_char]) -> int:
    return ctypes.addressof(buffer)


@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_vectors_of_the_standard(data: bytes, expected: int) -> None:
    assert crc32c(data) == bitwise(data) == expected


@given(st.binary(max_size=600), st.integers(0, 2**32 - 1))
def test_any_bytes_after_any_others(data: bytes, crc: int) -> None:
    assert crc32c(data, crc) == bitwise(data, crc)


@pytest.mark.parametrize("size_bytes", SIZES)
def test_sizes_around_every_step_at_odd_addresses(size_bytes: int) -> None:
    data = random_bytes(size_bytes, seed=size_bytes)
    expected = bitwise(data)
    for shift in (0, 1, 3, 8, 63):
        memory = ctypes.create_string_buffer(bytes(shift) + data, shift + size_bytes)
        assert crc32c_at(address_of(memory) + shift, size_bytes) == expected


@given(st.lists(st.integers(0, 20_000), max_size=6), st.integers(0, 2**32))
def test_pieces_make_the_whole(cuts: list[int], seed: int) -> None:
    data = random_bytes(20_000, seed)
    edges = [0, *sorted(cuts), len(data)]
    continued = combined = 0
    for start, end in pairwise(edges):
        piece = data[start:end]
        continued = crc32c(piece, continued)
        combined = crc32c_combine(combined, crc32c(piece), len(piece))
    assert continued == combined == crc32c(data)


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_combining_is_the_checksum_of_both(first: bytes, second: bytes) -> None:
    assert crc32c_combine(bitwise(first), bitwise(second), len(second)) == bitwise(first + second)


def test_combining_over_more_bytes_than_memory_has() -> None:
    zeros, size_bytes = crc32c(bytes(4096)), 4096
    for _ in range(40):  # 4 PiB of zeros, doubled up
        zeros, size_bytes = crc32c_combine(zeros, zeros, size_bytes), 2 * size_bytes
    ends = crc32c_combine(crc32c(b"first"), zeros, size_bytes)
    assert crc32c_combine(ends, crc32c(b"last"), 4) == crc32c_combine(
        crc32c(b"first"), crc32c_combine(zeros, crc32c(b"last"), 4), size_bytes + 4
    )


@pytest.mark.parametrize("size_bytes", SIZES + STREAMED)
@pytest.mark.parametrize(("to", "at"), [(0, 0), (1, 0), (0, 1), (37, 5), (64, 8)])
def test_a_copy_is_the_same_bytes_and_nothing_beside_them(size_bytes: int, to: int, at: int) -> None:
    data = random_bytes(at + size_bytes, seed=size_bytes)
    source = ctypes.create_string_buffer(data, len(data))
    target = ctypes.create_string_buffer(b"\xaa" * (to + size_bytes + 64), to + size_bytes + 64)
    crc = copy_crc32c(address_of(target) + to, address_of(source) + at, size_bytes, 0x12345678)
    assert crc == crc32c(data[at:], 0x12345678)
    assert target.raw == b"\xaa" * to + data[at:] + b"\xaa" * 64
    assert source.raw == data


@pytest.mark.parametrize("size_bytes", STREAMED)
def test_large_checksums_agree_with_those_of_their_pieces(size_bytes: int) -> None:
    data = random_bytes(size_bytes)
    crc = 0
    for start in range(0, size_bytes, 101):  # too small for streams and registers
        crc = crc32c(memoryview(data)[start : start + 101], crc)
    assert crc32c(data) == crc


def test_every_kind_of_buffer_reads_the_same() -> None:
    data = random_bytes(1000)
    assert crc32c(data) == crc32c(bytearray(data)) == crc32c(memoryview(data)) == bitwise(data)
    assert crc32c(memoryview(data).cast("I")) == crc32c(data)
    assert crc32c(memoryview(data)[3:17]) == crc32c(data[3:17])


def test_nothing_leaves_the_checksum_as_it_was() -> None:
    assert crc32c(b"", 5) == crc32c_at(0, 0, 5) == copy_crc32c(0, 0, 0, 5) == 5
    assert crc32c_combine(5, 0, 0) == 5


def test_what_cannot_be_checksummed_is_refused() -> None:
    with pytest.raises(BufferError):
        crc32c(memoryview(bytes(10))[::2])
    with pytest.raises(TypeError):
        crc32c("text")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        crc32c(b"", 1 << 32)
    with pytest.raises(TypeError):
        crc32c(b"", -1)


def test_threads_checksum_and_copy_side_by_side() -> None:
    data = random_bytes(1 << 20)
    source, expected = AlignedBuffer(len(data)), crc32c(data)
    source.view()[:] = data
    results: list[tuple[int, bool]] = []

    def work() -> None:
        target = AlignedBuffer(len(data))
        for _ in range(20):
            crc = copy_crc32c(target.address, source.address, len(data))
            results.append((crc, bytes(target.view()) == data))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [(expected, True)] * 80
