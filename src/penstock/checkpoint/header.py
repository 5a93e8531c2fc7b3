"""The header of a checkpoint: what lies where in the file, to bytes and back.

A checkpoint is a safetensors file: 8 bytes with the length of a JSON text, the text, and the data, which
the tensors cover without holes or overlap. What safetensors cannot express stands in the text's
``__metadata__``: how the tensors make up a state (`penstock.checkpoint.tree`), and checksums. The text
begins with the checksum of the whole header, so that a damaged header is refused before anything in it
is believed. Headers of other writers have no checksums and are believed as far as they make sense.

Nothing here trusts its input: the grammar is read by one pass without recursion, and what is kept is
about as large as the header. Whatever the safetensors library refuses is refused here.

An increment is a checkpoint of which some tensors lie in other files of its directory: it names them, by
file, place and checksum.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from penstock.checkpoint.failures import AGAIN, damaged
from penstock.errors import InvalidArgument, InvalidCheckpoint
from penstock.storage.checksum import crc32c

LENGTH_BYTES = 8

# Key of the metadata that says which tensors were not in the memory of the CPU.
DEVICES = "penstock.devices"

# Metadata that the loaders of transformers and accelerate ask for.
FOR_TORCH = {"format": "pt"}

# The largest JSON text that the safetensors library reads.
MAX_TEXT_BYTES = 100_000_000

# By safetensors' name, the bytes of one element. F4 is packed: its element, as torch holds it, is a pair.
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}

_METADATA = "__metadata__"
_FORMAT_KEY, _FORMAT, _OF_INCREMENTS = "penstock.format", "1", "2"
_TREE_KEY, _CHECKSUMS_KEY, _HEADER_KEY = "penstock.tree", "penstock.crc32c", "penstock.header_crc32c"
_SUMS_KEY, _ELSEWHERE_KEY = "penstock.sum64", "penstock.elsewhere"

# The keys of __metadata__ that belong to this module. Any of them marks a file as penstock's.
RESERVED_KEYS = (_HEADER_KEY, _FORMAT_KEY, _TREE_KEY, _CHECKSUMS_KEY, _SUMS_KEY, _ELSEWHERE_KEY)

# How the text of a penstock header begins: its checksum follows, in hexadecimal digits.
_BEGINNING = f'{{"{_METADATA}":{{"{_HEADER_KEY}":"'.encode()
_CHECKSUM_AT = LENGTH_BYTES + len(_BEGINNING)
_DIGITS = 8

_SPACE = r"[ \t\n\r]*"
_NUMBER = r"(?:0|[1-9][0-9]{0,18})"
_OPEN = re.compile(rf"{_SPACE}\{{{_SPACE}")
_COLON = re.compile(rf"{_SPACE}:{_SPACE}")
_NEXT = re.compile(rf"{_SPACE}([,}}]){_SPACE}")
_FIELD = "|".join(
    f'"{name}"{_SPACE}:{_SPACE}{value}'
    for name, value in {
        "dtype": '"([A-Z0-9_]{1,32})"',
        "shape": rf"\[{_SPACE}({_NUMBER}(?:{_SPACE},{_SPACE}{_NUMBER}){{0,63}}{_SPACE}|)\]",
        "data_offsets": rf"\[{_SPACE}({_NUMBER}){_SPACE},{_SPACE}({_NUMBER}){_SPACE}\]",
    }.items()
)
# Three fields in any order; each of them was there if each group took part.
_ENTRY = re.compile(rf"\{{{_SPACE}(?:(?:{_FIELD}){_SPACE}(?:,{_SPACE}(?!\}})|(?=\}}))){{3}}\}}")
_ENTRY_IN_WORDS = (
    '{"dtype": name, "shape": [at most 64 sizes], "data_offsets": [begin, end]} in whole numbers from 0'
)
# Of a file beside this one: nothing that leads out of the directory, and nothing hidden.
_FILE = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_json = json.JSONDecoder()


class TensorEntry(NamedTuple):
    """The bytes [begin, end) of the data section, which are one tensor.

    dtype    safetensors' name, a key of `ITEM_BYTES`
    shape    as torch holds it: F4 counts pairs along the last dimension
    crc32c   of the bytes; None where the writer gave none
    sum64    of the bytes as 64-bit words, modulo 2^64; None where the writer gave none. Together with the
             checksum it tells whether a tensor has changed, which 32 bits alone would get wrong in time
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    crc32c: int | None = None
    sum64: int | None = None

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


class Reference(NamedTuple):
    """A tensor that lies in the data section of ``file``, beside this one."""

    file: str
    entry: TensorEntry


@dataclass(frozen=True)
class Header:
    """What a header says.

    entries               in the order of their data, which they cover
    metadata              of the user, or of another writer
    tree                  how the tensors make up a state; None: a dict of all of them
    data_offset           where in the file the data section begins
    written_by_penstock   all entries have checksums, and the header's own was right
    elsewhere             tensors in other files
    """

    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]
    tree: str | None
    data_offset: int
    written_by_penstock: bool
    elsewhere: tuple[Reference, ...] = ()


def encode(
    entries: Sequence[TensorEntry],
    *,
    tree: str | None,
    metadata: Mapping[str, str] | None = None,
    alignment_bytes: int = 4096,
    elsewhere: Sequence[Reference] = (),
) -> bytes:
    """The beginning of the file, up to the data, which begins at a multiple of ``alignment_bytes``.

    Its size does not depend on the checksums, of which a missing one is written as 0: it is known
    before the data has been seen. Raises InvalidArgument for names and metadata that cannot be written.
    """
    own = {_FORMAT_KEY: _OF_INCREMENTS if elsewhere else _FORMAT}
    if tree is not None:
        own[_TREE_KEY] = tree
    everything = [*entries, *(reference.entry for reference in elsewhere)]
    own[_CHECKSUMS_KEY] = " ".join(f"{entry.crc32c or 0:08x}" for entry in everything)
    if any(entry.sum64 is not None for entry in everything):
        own[_SUMS_KEY] = " ".join(f"{entry.sum64 or 0:016x}" for entry in everything)
    if elsewhere:
        own[_ELSEWHERE_KEY] = _described_elsewhere(elsewhere)
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str) or key in RESERVED_KEYS:
            raise InvalidArgument(
                f"metadata {_short(key)}: {_short(value)} cannot be saved: give a dict of texts, with keys "
                f"other than {', '.join(RESERVED_KEYS)}"
            )
        own[key] = value
    members = ",".join(f"{_quoted(key)}:{_quoted(value)}" for key, value in own.items())
    described = "".join(f",{_described(entry)}" for entry in entries)
    text = b'%s%s",%s}%s}' % (_BEGINNING, b"0" * _DIGITS, _utf8(members), _utf8(described))
    size_bytes = -(-(LENGTH_BYTES + len(text)) // alignment_bytes) * alignment_bytes
    if size_bytes - LENGTH_BYTES > MAX_TEXT_BYTES:
        raise InvalidArgument(
            f"the header would take {size_bytes} bytes, and the format allows {MAX_TEXT_BYTES}: save fewer "
            f"than {len(entries)} tensors, or put large values other than tensors into tensors"
        )
    text = text.ljust(size_bytes - LENGTH_BYTES)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return header[:_CHECKSUM_AT] + b"%08x" % crc32c(header) + header[_CHECKSUM_AT + _DIGITS :]


def header_bytes(first8: bytes, file_bytes: int, path: str | Path) -> int:
    """The size of the header, from the file's first 8 bytes. Raises InvalidCheckpoint."""
    if file_bytes < LENGTH_BYTES or len(first8) < LENGTH_BYTES:
        raise InvalidCheckpoint(
            f"{path} has {min(file_bytes, len(first8))} bytes and is not a checkpoint: a header alone takes "
            f"more. The file is empty or was cut short. {AGAIN}"
        )
    length = int.from_bytes(first8[:LENGTH_BYTES], "little")
    if length > MAX_TEXT_BYTES:
        raise InvalidCheckpoint(
            f"{path} is not a checkpoint: its first 8 bytes would be the length of a header of {length} "
            f"bytes, and the format allows {MAX_TEXT_BYTES}. Give a file of penstock.save or of safetensors."
        )
    if LENGTH_BYTES + length > file_bytes:
        raise InvalidCheckpoint(
            f"{path} was cut short, or is not a checkpoint: its header would end at byte "
            f"{LENGTH_BYTES + length}, and the file has {file_bytes}. {AGAIN}"
        )
    return LENGTH_BYTES + length


def decode(data: bytes, file_bytes: int, path: str | Path) -> Header:
    """Read a header: as many bytes as `header_bytes` says, of a file of ``file_bytes``.

    Raises InvalidCheckpoint where the header is damaged, or says what cannot be.
    """
    length = header_bytes(data[:LENGTH_BYTES], file_bytes, path)
    if len(data) != length:
        raise InvalidCheckpoint(
            f"{path} was cut short: its header has {length} bytes, and {len(data)} are there. {AGAIN}"
        )
    checked = data.startswith(_BEGINNING, LENGTH_BYTES)
    if checked:
        _check_own_checksum(data, path)
    try:
        text = data[LENGTH_BYTES:].decode()
    except UnicodeDecodeError as error:
        raise InvalidCheckpoint(
            f"{path} is not a checkpoint, or its header is damaged: byte "
            f"{LENGTH_BYTES + error.start} is not UTF-8. {AGAIN}"
        ) from None
    entries, metadata = _Text(text, path).read()
    _check_cover(entries, file_bytes - length, path)
    if not checked:
        if mark := next((key for key in RESERVED_KEYS if key in metadata), None):
            problem = f"penstock wrote it, as {mark!r} says, and its header does not begin as it was written"
            raise damaged(path, problem)
        return Header(tuple(entries), metadata, None, length, False)
    del metadata[_HEADER_KEY]
    described: str | None = metadata.pop(_ELSEWHERE_KEY, None)
    if (version := metadata.pop(_FORMAT_KEY, "")) != (_FORMAT if described is None else _OF_INCREMENTS):
        raise InvalidCheckpoint(
            f"{path} has format {_short(version)}, and this penstock reads {_FORMAT!r}: update penstock"
        )
    tree = metadata.pop(_TREE_KEY, None)
    elsewhere = [] if described is None else _Text(described, path).read_elsewhere(entries)
    count = len(entries) + len(elsewhere)
    checksums = _numbers(_CHECKSUMS_KEY, metadata.pop(_CHECKSUMS_KEY, ""), _DIGITS, count, path)
    sums: Sequence[int | None] = [None] * count
    if _SUMS_KEY in metadata:
        sums = _numbers(_SUMS_KEY, metadata.pop(_SUMS_KEY), 2 * _DIGITS, count, path)
    pairs = iter(zip(checksums, sums, strict=True))
    summed = tuple(TensorEntry(*entry[:5], *next(pairs)) for entry in entries)
    references = tuple(Reference(file, TensorEntry(*entry[:5], *next(pairs))) for file, entry in elsewhere)
    return Header(summed, metadata, tree, length, True, references)


class _Text:
    """A header's JSON text, read once from its beginning to its end."""

    def __init__(self, text: str, path: str | Path) -> None:
        self._text = text
        self._path = path
        self._at = 0

    def read(self) -> tuple[list[TensorEntry], dict[str, str]]:
        """The entries by offset, and the metadata."""
        entries: list[TensorEntry] = []
        metadata: dict[str, str] = {}
        for name in self._members("tensor"):
            if name != _METADATA:
                entries.append(self._entry(name))
            elif self._text.startswith("null", self._at):
                self._at += len("null")
            else:
                metadata = {key: self._string() for key in self._members("the metadata")}
        self._check_end()
        return sorted(entries, key=lambda entry: (entry.begin, entry.end)), metadata

    def read_elsewhere(self, own: Sequence[TensorEntry]) -> list[Reference]:
        """The tensors by file, none of which has the name of one of ``own``."""
        found = [
            Reference(file, self._entry(name))
            for file in self._members("the file")
            for name in self._members("tensor")
        ]
        self._check_end()
        names = {entry.name for entry in own}
        for file, entry in found:
            if not _FILE.fullmatch(file):
                self._fail(f"tensor {_short(entry.name)} would lie in {_short(file)}, no name of a file")
            if entry.name in names:
                self._fail(f"tensor {_short(entry.name)} is there twice")
            names.add(entry.name)
        return found

    def _check_end(self) -> None:
        if self._at != len(self._text):
            self._fail(f"text follows the header's end: {_short(self._text[self._at : self._at + 80])}")

    def _members(self, kind: str) -> Iterator[str]:
        """The keys of an object. The caller reads each value before it asks for the next key."""
        self._take(_OPEN, "{")
        if self._text.startswith("}", self._at):
            self._take(_NEXT, "}")
            return
        keys: set[str] = set()
        while True:
            key = self._string()
            if key in keys:
                self._fail(f"{kind} {_short(key)} is there twice")
            keys.add(key)
            self._take(_COLON, ":")
            yield key
            if self._take(_NEXT, ", or }")[1] == "}":
                return

    def _entry(self, name: str) -> TensorEntry:
        match = _ENTRY.match(self._text, self._at)
        if match is None or None in (found := match.groups()):
            seen = self._text[self._at : self._at + 160]
            self._fail(f"tensor {_short(name)} is not described by {_ENTRY_IN_WORDS}, but by {_short(seen)}")
        self._at = match.end()
        dtype, sizes, begin, end = found
        shape = tuple(map(int, sizes.split(","))) if sizes else ()
        return _checked(TensorEntry(name, dtype, shape, int(begin), int(end)), self._path)

    def _string(self) -> str:
        if not self._text.startswith('"', self._at):
            self._fail(f"a text in quotes is missing at {_short(self._text[self._at : self._at + 80])}")
        try:
            value, self._at = _json.raw_decode(self._text, self._at)
            value.isascii() or value.encode()  # half of a surrogate pair is no UTF-8
        except ValueError as error:
            self._fail(f"a text is not what JSON allows ({error})")
        return str(value)

    def _take(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        match = pattern.match(self._text, self._at)
        if match is None:
            self._fail(f"{expected} is missing at {_short(self._text[self._at : self._at + 80])}")
        self._at = match.end()
        return match

    def _fail(self, problem: str) -> NoReturn:
        raise InvalidCheckpoint(
            f"{self._path} is not a checkpoint, or its header is damaged: {problem}. {AGAIN}"
        )


def _checked(entry: TensorEntry, path: str | Path) -> TensorEntry:
    """``entry`` as torch holds it."""
    shape, item_bytes = entry.shape, ITEM_BYTES.get(entry.dtype)
    if item_bytes is None:
        raise InvalidCheckpoint(
            f"{path}: tensor {_short(entry.name)} has dtype {entry.dtype}, which torch cannot hold; it holds "
            f"{', '.join(ITEM_BYTES)}. Open the file with the safetensors library."
        )
    problem, given_bytes = "", entry.end - entry.begin
    if entry.dtype == "F4":
        if not shape or shape[-1] % 2:
            problem = f"has shape {_short(shape)}, and F4 comes in pairs along the last dimension"
        shape = (*shape[:-1], shape[-1] // 2) if shape else shape
    # torch counts strides as if no dimension were empty.
    if item_bytes * math.prod(max(size, 1) for size in shape) >= 1 << 63:
        problem = problem or f"has shape {_short(shape)}, more elements than a tensor can have"
    elif not problem and (taken_bytes := item_bytes * math.prod(shape)) != given_bytes:
        problem = (
            f"has {given_bytes} bytes of data, from {entry.begin} to {entry.end}, and {entry.dtype} of shape "
            f"{_short(entry.shape)} takes {taken_bytes}"
        )
    if problem:
        raise damaged(path, f"tensor {_short(entry.name)} {problem}")
    return entry._replace(shape=shape)


def _check_cover(entries: Sequence[TensorEntry], data_bytes: int, path: str | Path) -> None:
    """Entries, by offset, cover the data exactly."""
    end = 0
    for entry in entries:
        if entry.begin != end:
            what = "leaves a hole after" if entry.begin > end else "overlaps"
            where = f"begins at byte {entry.begin} of the data and {what} what ends at {end}"
            raise damaged(path, f"tensor {_short(entry.name)} {where}")
        end = entry.end
    if end > data_bytes:
        cut = next(entry.name for entry in entries if entry.end > data_bytes)
        raise InvalidCheckpoint(
            f"{path} was cut short: {data_bytes} of {end} bytes of data are there. Tensor {_short(cut)} is "
            f"the first that is not whole. {AGAIN}"
        )
    if end < data_bytes:
        raise damaged(path, f"{data_bytes - end} bytes that belong to no tensor follow the data")


def _check_own_checksum(data: bytes, path: str | Path) -> None:
    end = _CHECKSUM_AT + _DIGITS
    written = data[_CHECKSUM_AT:end]
    actual = crc32c(data[end:], crc32c(data[:_CHECKSUM_AT] + b"0" * _DIGITS))
    if written != b"%08x" % actual:
        raise damaged(path, f"the checksum of its header is {actual:08x}, and {_short(written)} was written")


def _numbers(key: str, text: str, digits: int, count: int, path: str | Path) -> list[int]:
    """As many numbers of so many hexadecimal digits."""
    found = text.split(" ") if text else []
    pattern = re.compile(f"[0-9a-f]{{{digits}}}")
    if len(found) != count or not all(map(pattern.fullmatch, found)):
        raise damaged(path, f"{key!r} is {_short(text)}, not {count} checksums of {digits} digits")
    return [int(number, 16) for number in found]


def _described_elsewhere(elsewhere: Sequence[Reference]) -> str:
    """As in a header, by file. Those of one file follow each other."""
    files = [
        f"{_quoted(file)}:{{{','.join(_described(reference.entry) for reference in references)}}}"
        for file, references in itertools.groupby(elsewhere, lambda reference: reference.file)
    ]
    return f"{{{','.join(files)}}}"


def _described(entry: TensorEntry) -> str:
    shape = (*entry.shape[:-1], 2 * entry.shape[-1]) if entry.dtype == "F4" else entry.shape
    sizes = ",".join(map(str, shape))
    return (
        f'{_quoted(entry.name)}:{{"dtype":"{entry.dtype}","shape":[{sizes}],'
        f'"data_offsets":[{entry.begin},{entry.end}]}}'
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        around = text[max(error.start - 20, 0) : error.end + 20]
        raise InvalidArgument(
            f"the text {_short(around)} cannot be saved: half of a surrogate pair is not allowed in UTF-8"
        ) from None


def _short(value: object) -> str:
    """``value`` for a message."""
    text = repr(value[:200] if isinstance(value, str | bytes) else value)
    return text if len(text) <= 160 else f"{text[:150]}..."
