"""Tar shards become samples by WebDataset's rule; archives that are damaged or hostile are refused."""

from __future__ import annotations

import gzip
import io
import logging
import os
import pickle
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidArgument, SampleError
from penstock.samples.encoding import decode
from penstock.samples.sources import RawSample, Source, open_source
from penstock.samples.sources.webdataset import members

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
NAME = st.text(st.sampled_from("aé.大-"), min_size=1, max_size=40).filter(
    lambda part: part not in (".", "..")
)


def member(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def archive(*entries: tuple[tarfile.TarInfo, bytes], format: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def samples(source: Source) -> list[tuple[str, dict[str, bytes]]]:
    return [(sample.name, decode(sample.data)) for sample in source if isinstance(sample, RawSample)]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.lists(NAME, min_size=1, max_size=8), st.binary(max_size=1200)), max_size=6),
    st.sampled_from(sorted(FORMATS)),
    st.booleans(),
)
def test_members_are_those_that_tarfile_reads(
    tmp_path_factory: pytest.TempPathFactory, files: list[tuple[list[str], bytes]], kind: str, packed: bool
) -> None:
    path = tmp_path_factory.mktemp("tar") / ("a.tar.gz" if packed else "a.tar")
    entries = []
    for parts, data in files:
        name = "/".join(parts)
        try:
            tarfile.TarInfo(name).tobuf(FORMATS[kind])
        except ValueError:
            continue  # too long for this format
        entries.append(member(name, data))
    content = archive(member("folder", type=tarfile.DIRTYPE), *entries, format=FORMATS[kind])
    path.write_bytes(gzip.compress(content) if packed else content)
    expected = [(info.name, data) for info, data in entries]
    assert [tuple(each) for each in members(str(path), 1 << 20)] == expected


def test_files_of_one_key_are_one_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entries = [
        member("a/1.txt", b"t"),
        member("a/1.seg.PNG", b"p"),
        member("./b.c/2.cls", b"2"),
        member("readme", b"left out"),
        member(".hidden", b"left out"),
        member("__meta__.json", b"left out"),
        member("a/1.txt", b"again, after others"),
        member("ü.", b"empty extension"),
    ]
    (tmp_path / "x.tar").write_bytes(archive(*entries))
    with caplog.at_level(logging.WARNING, "penstock"):
        found = samples(open_source(tmp_path / "x.tar"))
    assert found == [
        ("a/1", {"txt": b"t", "seg.png": b"p"}),
        ("b.c/2", {"cls": b"2"}),
        ("a/1", {"txt": b"again, after others"}),
        ("ü", {"": b"empty extension"}),
    ]
    assert "3 files have no extension" in caplog.text


def make_shards(folder: Path, shards: int, each: int) -> list[tuple[str, dict[str, bytes]]]:
    expected = []
    for shard in range(shards):
        keys = [f"s{shard}-{i}" for i in range(each)]
        expected += [(key, {"bin": key.encode() * 3}) for key in keys]
        (folder / f"train-{shard:02d}.tar").write_bytes(
            archive(*(member(f"{key}.bin", key.encode() * 3) for key in keys))
        )
    return expected


@pytest.mark.parametrize("pattern", ["", "train-{00..02}.tar", "train-*.tar", "train-0{0,1,2}.tar"])
def test_shards_are_found_by_folder_and_pattern(tmp_path: Path, pattern: str) -> None:
    expected = make_shards(tmp_path, 3, 2)
    source = open_source(os.path.join(tmp_path, pattern))
    assert source.encoding == "msgpack"
    assert samples(source) == expected
    assert source.size_bytes == sum(os.path.getsize(path) for path in tmp_path.iterdir())
    assert samples(open_source(sorted(tmp_path.glob("*.tar")))) == expected


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_shares_are_disjoint_and_complete(tmp_path: Path, world_size: int) -> None:
    expected = make_shards(tmp_path, 3, 5)
    shares = [samples(open_source(tmp_path).of_rank(rank, world_size)) for rank in range(world_size)]
    assert sorted(pair for share in shares for pair in share) == sorted(expected)


def test_a_prefix_tells_equal_keys_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.tar").write_bytes(archive(member("key.txt", b"1")))
    source = open_source([tmp_path / "a" / "0.tar", tmp_path / "b" / "0.tar"], prefix="shard")
    assert [name for name, _ in samples(source)] == ["a/0.tar/key", "b/0.tar/key"]


@pytest.mark.parametrize(
    ("values", "classes", "labels"),
    [
        (["2", "0\n", "-1", None], ("0", "1", "2"), [2, 0, -1, -1]),
        (["dog", "cat", None, "dog"], ("cat", "dog"), [1, 0, -1, 1]),
        ([None], (), [-1]),
    ],
)
def test_labels_come_from_an_extension(
    tmp_path: Path, values: list[str | None], classes: tuple[str, ...], labels: list[int]
) -> None:
    entries = []
    for i, value in enumerate(values):
        entries.append(member(f"{i}.txt", b"x"))
        if value is not None:
            entries.append(member(f"{i}.cls", value.encode()))
    (tmp_path / "a.tar").write_bytes(archive(*entries))
    source = open_source(tmp_path / "a.tar", label_column="cls")
    assert source.classes == classes
    assert [sample.label for sample in source if isinstance(sample, RawSample)] == labels
    assert open_source(tmp_path / "a.tar").classes == ()
    if classes:
        with pytest.raises(SampleError, match="sample 0"):
            list(open_source(tmp_path / "a.tar", label_column="cls", classes=["other"]))


def linked(kind: bytes, target: str = "/etc/passwd") -> tuple[tarfile.TarInfo, bytes]:
    return member("a.txt", type=kind, linkname=target)


def with_size(size_bytes: int, **fields: object) -> bytes:
    """An archive whose first member is said to have another size than it has."""
    info, _ = member("a.txt", **fields)
    info.size = size_bytes
    return info.tobuf(tarfile.GNU_FORMAT) + b"x" * 512 + bytes(1024)


def checksummed(block: bytes) -> bytes:
    total = sum(block[:148]) + 8 * 32 + sum(block[156:])
    return block[:148] + b"%06o\0 " % total + block[156:]


def with_field(at: int, value: bytes) -> bytes:
    block = bytearray(archive(member("a.txt", b"x")))
    block[at : at + len(value)] = value
    return checksummed(bytes(block[:512])) + bytes(block[512:])


GOOD = archive(member("a.txt", b"x" * 700), member("b.txt", b"y"))
PAX = {"pax_headers": {"path": "/etc/a.txt"}}
HOSTILE: dict[str, tuple[bytes, str]] = {
    "absolute": (archive(member("/etc/a.txt", b"x")), r"'/etc/a.txt' leads out"),
    "climbs out": (archive(member("a/../../b.txt", b"x")), r"'a/../../b.txt' leads out"),
    "climbs out by a long name": (archive(member("a/" * 80 + "../b.txt", b"x")), "leads out"),
    "absolute by pax": (
        archive(member("a.txt", b"x", **PAX), format=tarfile.PAX_FORMAT),
        "leads out",
    ),
    "a folder that climbs out": (archive(member("../a", type=tarfile.DIRTYPE)), "leads out"),
    "symbolic link": (archive(linked(tarfile.SYMTYPE)), "a.txt is a symbolic link"),
    "hard link": (archive(linked(tarfile.LNKTYPE)), "a.txt is a hard link"),
    "character device": (archive(linked(tarfile.CHRTYPE)), "a character device"),
    "block device": (archive(linked(tarfile.BLKTYPE)), "a block device"),
    "pipe": (archive(linked(tarfile.FIFOTYPE)), "a pipe"),
    "sparse": (archive(linked(tarfile.GNUTYPE_SPARSE)), "a sparse file"),
    "unknown kind": (archive(linked(b"Q")), "unknown kind b'Q'"),
    "larger than the archive": (with_size(5000), "a.txt is said to have 5000 bytes, of which 1536 are there"),
    "absurdly large": (with_size(1 << 62), "a.txt is said to have 4611686018427387904 bytes"),
    "negative": (with_size(-5), "has no valid size"),
    "size that is no number": (with_field(124, b"12x45678901\0"), "has no valid size"),
    "size by pax": (
        archive(member("a.txt", b"x", pax_headers={"size": "9" * 18}), format=tarfile.PAX_FORMAT),
        "a.txt is said to have 9{18} bytes",
    ),
    "negative by pax": (
        archive(member("a.txt", b"x", pax_headers={"size": "-7"}), format=tarfile.PAX_FORMAT),
        "has no valid size",
    ),
    "long name of absurd size": (with_size(1 << 50, type=tarfile.GNUTYPE_LONGNAME), "header is said to have"),
    "pax header that is damaged": (
        archive(member("p", b"99 path=", type=tarfile.XHDTYPE)),
        "pax header before byte",
    ),
    "sparse by pax": (
        archive(member("a.txt", b"x", pax_headers={"GNU.sparse.major": "1"}), format=tarfile.PAX_FORMAT),
        "sparse",
    ),
    "flipped header": (GOOD[:5] + b"!" + GOOD[6:], "not a tar archive"),
    "flipped later header": (GOOD[:1540] + b"!" + GOOD[1541:], "header at byte 1536 is damaged"),
    "cut in data": (GOOD[:1000], "of which 488 are there"),
    "cut in padding": (GOOD[:1300], "cut off"),
    "cut in a header": (GOOD[:1600], "ends in a header"),
    "cut after a member": (GOOD[:1536], "no end mark"),
    "no archive": (b"PK\3\4" + bytes(range(256)) * 4, "not a tar archive"),
    "empty": (b"", "is empty"),
    "no name": (with_field(0, bytes(10)), "has no name"),
    "twice one extension": (
        archive(member("a.txt", b"1"), member("a.TXT", b"2")),
        "two files with the extension",
    ),
    "extension that is no text": (
        archive(member(os.fsdecode(b"a.\xff"), b"1"), format=tarfile.GNU_FORMAT),
        "cannot be stored",
    ),
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives_are_refused(tmp_path: Path, case: str, packed: bool) -> None:
    content, said = HOSTILE[case]
    path = tmp_path / ("shard.tar.gz" if packed else "shard.tar")
    path.write_bytes(gzip.compress(content) if packed else content)
    if packed and ("are there" in said or case == "absurdly large"):
        said = "a.txt"  # the size of what is packed is not known beforehand
    tracemalloc.start()
    try:
        with pytest.raises(SampleError, match=said) as failure:
            list(open_source(path))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(failure.value)
    assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-20],
        lambda data: data[:40] + b"\xff\xff\xff" + data[43:],
        lambda data: data[:-8] + bytes(8),
    ],
    ids=["cut", "flipped", "wrong sum"],
)
def test_damaged_gzip_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "shard.tar.gz"
    path.write_bytes(damage(gzip.compress(archive(member("a.bin", os.urandom(5000))))))
    with pytest.raises(SampleError, match=r"shard\.tar\.gz"):
        list(members(str(path), 1 << 20))


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4),
    st.integers(0, len(GOOD)),
)
def test_damage_anywhere_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], length: int
) -> None:
    damaged = bytearray(GOOD)
    for at, byte in flips:
        damaged[at] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.tar"
    path.write_bytes(damaged[:length])
    try:
        found = list(members(str(path), 1 << 20))
    except SampleError:
        return
    assert all(".." not in name.split("/") and not name.startswith("/") for name, _ in found)


def test_large_members_need_permission(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(archive(member("a.bin", bytes(3000)), member("a.txt", bytes(3000))))
    assert len(list(open_source(tmp_path / "a.tar"))) == 1
    with pytest.raises(
        SampleError, match=r"a\.bin is said to have 3000 bytes: more than 1000 B.*max_sample_bytes"
    ):
        list(open_source(tmp_path / "a.tar", max_sample_bytes=1000))
    with pytest.raises(SampleError, match="sample a has more than 4000 bytes"):
        list(open_source(tmp_path / "a.tar", max_sample_bytes=4000))


def test_patterns_that_lead_nowhere_are_said(tmp_path: Path) -> None:
    make_shards(tmp_path, 1, 1)
    with pytest.raises(SampleError, match=r"train-01\.tar does not exist"):
        open_source(f"{tmp_path}/train-{{00..05}}.tar")
    with pytest.raises(SampleError, match="does not exist"):
        open_source(f"{tmp_path}/none-*.tar")
    with pytest.raises(InvalidArgument, match="named twice"):
        open_source([f"{tmp_path}/train-00.tar"] * 2)
    with pytest.raises(InvalidArgument, match="more than"):
        open_source(f"{tmp_path}/{{0..99999999999}}.tar")
