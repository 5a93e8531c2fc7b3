"""Sample stores written by another hand: straight from docs/formats.md, slowly, with none of penstock's code.

What penstock reads of these, and what these functions read of penstock's stores, must agree.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

_CRC_TABLE = []
for _value in range(256):
    for _ in range(8):
        _value = _value >> 1 ^ (0x82F63B78 if _value & 1 else 0)
    _CRC_TABLE.append(_value)

LARGE = (1 << 23) - 1


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def key_of(name: bytes) -> int:
    return xxhash.xxh64_intdigest(name, seed=0) & (1 << 48) - 1


def write_store(
    folder: Path,
    samples: Sequence[tuple[str, bytes]],
    *,
    chunk_bytes: int = 4096,
    data_file_bytes: int = 1 << 40,
    labels: Sequence[int] = (),
    **manifest: Any,
) -> None:
    """Write the store; `manifest` adds or replaces fields of store.json."""
    folder.mkdir(parents=True, exist_ok=True)
    data_files: list[list[tuple[int, bytes]]] = [[]]
    entries = []
    offset = 0
    for index, (name, data) in enumerate(samples):
        if data_files[-1] and offset + len(data) > data_file_bytes:
            data_files.append([])
            offset = 0
        data_files[-1].append((index, data))
        entries.append((len(data_files) - 1, key_of(_bytes(name)), offset, len(data)))
        offset += len(data)
    directory = b"".join(
        struct.pack("<QQ", data_file << 48 | key, offset << 24 | min(length, LARGE) << 1)
        for data_file, key, offset, length in entries
    )
    data_file_fields, chunk_records = [], b""
    for number, data_file in enumerate(data_files):
        size_bytes = sum(len(data) for _, data in data_file)
        chunks = max(1, -(-size_bytes // chunk_bytes))
        content = b"".join(data for _, data in data_file).ljust(chunks * chunk_bytes, b"\0")
        (folder / f"data-{number:05d}.bin").write_bytes(content)
        data_file_fields.append({"samples": len(data_file), "chunks": chunks, "size_bytes": size_bytes})
        following = data_file[-1][0] + 1 if data_file else 0
        for chunk in range(chunks):
            held = [i for i, _ in data_file if min(entries[i][2] // chunk_bytes, chunks - 1) == chunk]
            later = [i for i, _ in data_file if min(entries[i][2] // chunk_bytes, chunks - 1) > chunk]
            first = held[0] if held else later[0] if later else following
            body = [i for i in held if not _is_long_edge(entries[i], chunk_bytes)]
            crc = crc32c(b"".join(samples[i][1] for i in body))
            chunk_records += struct.pack("<QII", first, crc, 0)
    names, anchors = b"", b""
    for index, (name, _) in enumerate(samples):
        if index % 16 == 0:
            anchors += struct.pack("<Q", len(names))
        names += struct.pack("<H", len(_bytes(name))) + _bytes(name)
    files = {
        "directory.bin": directory,
        "sums.bin": b"".join(struct.pack("<I", crc32c(data)) for _, data in samples),
        "chunks.bin": chunk_records,
        "names.bin": names,
        "anchors.bin": anchors,
        "lookup.bin": _lookup([key for _, key, _, _ in entries]),
    }
    large = [(i, length) for i, (_, _, _, length) in enumerate(entries) if length >= LARGE]
    if large:
        files["large.bin"] = b"".join(struct.pack("<QQ", *pair) for pair in large)
    if labels:
        files["labels.bin"] = b"".join(struct.pack("<i", label) for label in labels)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    value = {
        "samples": len(samples),
        "chunk_bytes": chunk_bytes,
        "nodes": data_file_fields,
        "files": {
            file: {"size_bytes": len(content), "crc32c": crc32c(content)} for file, content in files.items()
        },
        "encoding": "raw",
        "fields": [],
        "classes": [],
        "part": 0,
        "parts": 1,
        "source": "",
        "metadata": {},
        "crc32c": 0,
    } | manifest
    value["crc32c"] = crc32c(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())
    document = {"schema": "penstock.storemanifest/1", "value": value}
    (folder / "store.json").write_text(json.dumps(document, ensure_ascii=False))


def _is_long_edge(entry: tuple[int, int, int, int], chunk_bytes: int) -> bool:
    _, _, offset, length = entry
    crosses = offset % chunk_bytes + length > chunk_bytes
    return crosses and length >= chunk_bytes // 4


def _lookup(keys: list[int]) -> bytes:
    bits = max(0, len(keys).bit_length() - 3)
    buckets: list[list[int]] = [[] for _ in range(1 << bits)]
    for index, key in enumerate(keys):
        buckets[key >> 48 - bits].append((key & 0xFFFFFF) << 40 | index)
    words, starts = b"", struct.pack("<I", 0)
    for bucket in buckets:
        words += b"".join(struct.pack("<Q", word) for word in bucket)
        starts += struct.pack("<I", len(words) // 8)
    return words + starts


def read_store(folder: Path) -> list[tuple[str, bytes]]:
    """Every sample, in stored order, from the files alone."""
    value = json.loads((folder / "store.json").read_text())["value"]
    directory = (folder / "directory.bin").read_bytes()
    names = (folder / "names.bin").read_bytes()
    large_file = folder / "large.bin"
    large_bytes = large_file.read_bytes() if large_file.exists() else b""
    large = dict(struct.iter_unpack("<QQ", large_bytes))
    found, at = [], 0
    for index, (place, extent) in enumerate(struct.iter_unpack("<QQ", directory)):
        (length,) = struct.unpack_from("<H", names, at)
        name = names[at + 2 : at + 2 + length]
        at += 2 + length
        assert place & (1 << 48) - 1 == key_of(name)
        size_bytes = large.get(index, extent >> 1 & LARGE)
        with open(folder / f"data-{place >> 48:05d}.bin", "rb") as file:
            file.seek(extent >> 24)
            found.append((name.decode("utf-8", "surrogateescape"), file.read(size_bytes)))
    assert len(found) == value["samples"]
    return found


def extract_namespace(image: bytes, folder: Path) -> list[Path]:
    """The store of a namespace whose bytes these are, as folders again, one for each partition."""
    superblocks = []
    for offset in (0, 512 << 10):
        block = image[offset : offset + 512]
        if block[:16] == b"penstock-samples" and struct.unpack("<I", block[508:])[0] == crc32c(block[:508]):
            superblocks.append(struct.unpack_from("<IIQ16s16sQQQQII", block, 16))
    _, state, _, _, _, _, used_bytes, table_offset, table_bytes, table_crc, files = max(
        superblocks, key=lambda superblock: superblock[2]
    )
    assert state == 2, "the upload was not finished"
    assert used_bytes <= len(image)
    table = image[table_offset : table_offset + table_bytes]
    assert crc32c(table) == table_crc
    folders = {}
    for offset, size_bytes, crc, _, name in struct.iter_unpack("<QQII40s", table):
        path = folder / name.rstrip(b"\0").decode("ascii")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image[offset : offset + size_bytes])
        assert crc32c(path.read_bytes()) == crc
        folders[path.parent] = None
    assert len(table) == 64 * files
    return list(folders)


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")
