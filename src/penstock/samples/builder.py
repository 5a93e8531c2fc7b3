"""Encodes samples into the bytes of a store's files, in one pass: see docs/formats.md."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.samples import layout
from penstock.storage.checksum import crc32c

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
Pieces = tuple[list[tuple[int, Bytes]], dict[str, bytes]]

_MOST_SINGLE_BYTES = 1 << 20  # of samples that came one by one, until they are built together
_MOST_SINGLES = 1 << 12
_STATE_MARK = 0x31444C424B545350  # "PSTKBLD1"
_STATE_WORDS = 11  # then three for each data file, and the checksum


class Block(NamedTuple):
    """Samples one after the other, encoded: many at once.

    names      uint8: their names' bytes, back to back
    name_ends  [n] int64: where each name ends in names
    data       uint8: their bytes, back to back
    data_ends  [n] int64: where each sample ends in data
    labels     [n] int32, or None: no sample has a class
    """

    names: Bytes
    name_ends: Numbers
    data: Bytes
    data_ends: Numbers
    labels: npt.NDArray[np.int32] | None = None

    def part(self, begin: int, end: int) -> Block:
        """Those from ``begin`` up to ``end``."""
        ends = self.name_ends, self.data_ends
        names, data = (slice(int(each[begin - 1]) if begin else 0, int(each[end - 1])) for each in ends)
        return Block(
            self.names[names],
            self.name_ends[begin:end] - names.start,
            self.data[data],
            self.data_ends[begin:end] - data.start,
            None if self.labels is None else self.labels[begin:end],
        )


class Builder:
    """Takes samples; returns what to append to the files. ValueError for what does not fit the format.

    state          of another builder, to continue from there; empty: from the start
    pending_bytes  about how much `take` would return
    """

    def __init__(self, chunk_bytes: int, data_file_bytes: int, state: bytes = b"") -> None:
        if chunk_bytes % layout.SMALLEST_CHUNK_BYTES or not 0 < chunk_bytes <= layout.LARGEST_CHUNK_BYTES:
            raise ValueError(
                f"chunk_bytes={chunk_bytes} must be a multiple of {layout.SMALLEST_CHUNK_BYTES}, at most "
                f"{layout.LARGEST_CHUNK_BYTES}"
            )
        if not 0 < data_file_bytes <= layout.DATA_FILE_BYTES:
            raise ValueError(f"data_file_bytes={data_file_bytes} must be from 1 to {layout.DATA_FILE_BYTES}")
        self._chunk_bytes, self._data_file_bytes = chunk_bytes, data_file_bytes
        self._built = self._names_bytes = 0  # samples, and bytes of names.bin
        self._closed: list[tuple[int, int, int]] = []  # data files before the one under way
        self._file_samples = self._offset = 0  # of the one under way
        self._first = self._body_crc = 0  # of its last chunk
        self._finished = False
        self._whole = True  # not while samples are added: Ctrl-C or a lack of memory can end that
        self._singles: list[tuple[bytes, bytes, int]] = []
        self._single_bytes = 0
        self._data: list[tuple[int, Bytes]] = []
        self._files: defaultdict[str, list[bytes]] = defaultdict(list)
        self.pending_bytes = 0
        if state:
            self._load(state)

    @property
    def samples(self) -> int:
        return self._built + len(self._singles)

    @property
    def data_files(self) -> list[tuple[int, int, int]]:
        """Samples, chunks and bytes of each; of the last one as if it ended here."""
        self._build_singles()
        return [*self._closed, self._open_data_file()] if self._file_samples else list(self._closed)

    @property
    def whole_data_files(self) -> list[tuple[int, int, int]]:
        """As `data_files`, of those that take no more samples."""
        return list(self._closed)

    def add(self, name: bytes, data: bytes | bytearray | memoryview, label: int = -1) -> None:
        """One sample."""
        if not -1 << 31 <= label < 1 << 31:
            raise ValueError(f"sample {self.samples} has the label {label}: give -1, or that of a class")
        if type(data) is not bytes:
            data = bytes(memoryview(data).cast("B"))  # the caller may use its memory again
        if len(self._closed) + 1 >= layout.MOST_DATA_FILES:  # whether it still fits is known at once
            self.add_many(Block(*joined((name,)), *joined((data,)), np.array([label], np.int32)))
            return
        self._check(self.samples, len(name), len(data))
        self._singles.append((name, data, label))
        self._single_bytes += len(data)
        self.pending_bytes += len(name) + len(data)
        if self._single_bytes >= _MOST_SINGLE_BYTES or len(self._singles) >= _MOST_SINGLES:
            self._build_singles()

    def add_many(self, block: Block) -> None:
        """Samples side by side. All of them, or none where one does not fit."""
        self._build_singles()
        names, name_ends = np.asarray(block.names, np.uint8), np.asarray(block.name_ends, np.int64)
        data, data_ends = np.array(block.data, np.uint8), np.asarray(block.data_ends, np.int64)
        labels = None if block.labels is None else np.asarray(block.labels, np.int32)
        self._add(Block(names, name_ends, data, data_ends, labels))

    def finish(self) -> None:
        """No more samples: closes the last chunk, and pads the last data file."""
        self._build_singles()
        if self._file_samples and not self._finished:
            self._close_data_file()
        self._finished = True

    def take(self) -> Pieces:
        """The output since the last call: bytes to append to the data files, in order, and to other files."""
        self._build_singles()
        if not self._whole:
            raise RuntimeError("adding samples was broken off: go on from the last state")
        made = self._data, {name: b"".join(self._files[name]) for name in layout.PACKED_FILES}
        self._data, self._files, self.pending_bytes = [], defaultdict(list), 0
        return made

    def state(self) -> bytes:
        """The state from which a new builder can continue. Call it right after `take`."""
        if self.pending_bytes:
            raise RuntimeError("there are pieces that were not taken: take them first")
        now = (self._built, self._names_bytes, self._file_samples, self._offset, self._first, self._body_crc)
        sizes = self._chunk_bytes, self._data_file_bytes
        words = [_STATE_MARK, *sizes, *now, int(self._finished), len(self._closed)]
        data = np.array([*words, *(each for file in self._closed for each in file)], "<u8").tobytes()
        return data + np.array([crc32c(data)], "<u8").tobytes()

    def _load(self, state: bytes) -> None:
        words = [] if len(state) % 8 else np.frombuffer(state, "<u8").tolist()
        if (
            len(words) <= _STATE_WORDS
            or words[0] != _STATE_MARK
            or words[-1] != crc32c(state[:-8])
            or len(words) != _STATE_WORDS + 3 * words[10] + 1
        ):
            raise ValueError("this is no state of a builder, or it is damaged: pack from the start")
        if words[1:3] != [self._chunk_bytes, self._data_file_bytes]:
            raise ValueError(
                f"the state is of chunk_bytes={words[1]} and data_file_bytes={words[2]}, not "
                f"{self._chunk_bytes} and {self._data_file_bytes}: give the same"
            )
        self._built, self._names_bytes, self._file_samples, self._offset = words[3:7]
        self._first, self._body_crc, self._finished = words[7], words[8], bool(words[9])
        files = iter(words[_STATE_WORDS:-1])
        self._closed = list(zip(files, files, files, strict=True))

    def _check(self, sample: int, name_bytes: int, size_bytes: int) -> None:
        if self._finished:
            raise RuntimeError("the store is finished: it takes no more samples")
        if not name_bytes:
            raise ValueError(f"sample {sample} has an empty name: give it one")
        if name_bytes > layout.LARGEST_NAME_BYTES:
            raise ValueError(
                f"the name of sample {sample} has {name_bytes} bytes: at most {layout.LARGEST_NAME_BYTES} "
                "fit, give it a shorter one"
            )
        if size_bytes > self._data_file_bytes:
            raise ValueError(
                f"sample {sample} has {size_bytes} bytes: a data file takes at most {self._data_file_bytes}, "
                "and no sample lies in two. Give a larger data_file_bytes, or divide the sample"
            )

    def _build_singles(self) -> None:
        if self._singles:
            self._whole = False
            names, contents, labels = zip(*self._singles, strict=True)
            self.pending_bytes -= self._single_bytes + sum(map(len, names))
            self._singles, self._single_bytes = [], 0
            self._add(Block(*joined(names), *joined(contents), np.array(labels, np.int32)))

    def _add(self, block: Block) -> None:
        """All is checked before anything changes. The data is not copied."""
        names, name_ends, data, data_ends, labels = block
        count = len(name_ends)
        if len(data_ends) != count:
            raise ValueError(f"{count} name ends and {len(data_ends)} data ends: each sample has one of both")
        if labels is not None and len(labels) != count:
            raise ValueError("there must be one label for every sample, or None for all")
        name_sizes, sizes = _sizes(name_ends, len(names), "name"), _sizes(data_ends, len(data), "data")
        wrong = (name_sizes == 0) | (name_sizes > layout.LARGEST_NAME_BYTES) | (sizes > self._data_file_bytes)
        for at in np.flatnonzero(wrong | self._finished)[:1].tolist():
            self._check(self._built + at, int(name_sizes[at]), int(sizes[at]))
        data_begins = data_ends - sizes
        cuts = self._cuts(data_begins, data_ends)
        sums = _native.sample_sums(data.ctypes.data, data_ends)
        keys = _native.sample_keys(names, name_ends)
        numbers = np.arange(self._built, self._built + count)
        self._whole = False
        for number, (low, high) in enumerate(pairwise([0, *cuts, count])):
            if number:
                self._close_data_file()
            if low < high:
                run = slice(low, high)
                begin, end = int(data_begins[low]), int(data_ends[high - 1])
                offsets = data_begins[run] + (self._offset - begin)
                entries = layout.pack_entries(len(self._closed), keys[run], offsets, sizes[run])
                self._put(layout.DIRECTORY, entries)
                if begin < end:
                    self._data.append((len(self._closed), data[begin:end]))
                    self.pending_bytes += end - begin
                self._add_chunks(offsets, sizes[run], data[begin:end])
                self._built += high - low
                self._file_samples += high - low
                self._offset += end - begin
        large = np.flatnonzero(sizes >= layout.LARGE_LENGTH)
        places = self._names_bytes + name_ends - name_sizes + 2 * np.arange(count)
        self._names_bytes += len(names[: int(name_ends[-1]) if count else 0]) + 2 * count
        self._put(layout.SUMS, sums)
        self._put(layout.LARGE, np.stack([numbers[large], sizes[large]], axis=1))
        self._put(layout.NAMES, with_lengths(names, name_ends))
        self._put(layout.ANCHORS, places[numbers % layout.ANCHOR_NAMES == 0])
        self._put(layout.LABELS, np.full(count, -1, np.int32) if labels is None else labels)
        self._whole = True

    def _cuts(self, begins: Numbers, ends: Numbers) -> list[int]:
        """The samples with which a data file begins, besides the one under way.

        An offset of 2^40 does not fit, not even for a sample of no bytes.
        """
        cuts: list[int] = []
        file_begin = -self._offset
        while True:
            full = int(np.searchsorted(ends, file_begin + self._data_file_bytes, side="right"))
            cut = min(full, int(np.searchsorted(begins, file_begin + layout.DATA_FILE_BYTES)))
            if cut >= len(ends):
                return cuts
            if len(self._closed) + len(cuts) + 1 >= (most := layout.MOST_DATA_FILES):
                raise ValueError(
                    f"sample {self._built + cut} would need data file {most} of {most} (from 0 on). Give "
                    f"a larger data_file_bytes than {self._data_file_bytes}"
                )
            cuts.append(cut)
            file_begin = int(begins[cut])

    def _add_chunks(self, offsets: Numbers, sizes: Numbers, data: Bytes) -> None:
        """Go on with the last chunk of the data file; records of those that are now whole.

        data   of samples at these offsets, which follow what the file has
        """
        chunk_bytes, begin, end = self._chunk_bytes, self._offset, self._offset + len(data)
        ends = offsets + sizes
        chunk_ends = np.arange(begin // chunk_bytes + 1, end // chunk_bytes + 2) * chunk_bytes
        firsts = np.searchsorted(offsets, chunk_ends)  # of the chunk behind each
        lasts = np.maximum(firsts - 1, 0)
        long = (ends[lasts] > chunk_ends) & (sizes[lasts] >= layout.long_edge_bytes(chunk_bytes))
        body_ends = np.where(long, offsets[lasts], ends[lasts])
        low = 0
        for chunk_end, high, body_end in zip(
            chunk_ends.tolist(), firsts.tolist(), body_ends.tolist(), strict=True
        ):
            if low < high:
                body = data[int(offsets[low]) - begin : body_end - begin]
                self._body_crc = crc32c(body.data, self._body_crc)
            if chunk_end <= end:
                self._put_chunk()
                self._first, self._body_crc = self._built + high, 0
            low = high

    def _put_chunk(self) -> None:
        self._put(layout.CHUNKS, np.array([(self._first, self._body_crc, 0)], layout.CHUNK_RECORD))

    def _close_data_file(self) -> None:
        # Samples of no bytes at the end of the last chunk change no record, and begin no chunk.
        if self._offset % self._chunk_bytes or not self._offset:
            self._put_chunk()
            padding = np.zeros(self._chunk_bytes - self._offset % self._chunk_bytes, np.uint8)
            self._data.append((len(self._closed), padding))
            self.pending_bytes += len(padding)
        self._closed.append(self._open_data_file())
        self._file_samples = self._offset = self._body_crc = 0
        self._first = self._built

    def _open_data_file(self) -> tuple[int, int, int]:
        return self._file_samples, layout.chunks_of(self._offset, self._chunk_bytes), self._offset

    def _put(self, name: str, values: npt.NDArray[Any]) -> None:
        self._files[name].append(values.tobytes())
        self.pending_bytes += values.nbytes


def lookup_of(
    directory: npt.NDArray[np.uint64], names: Bytes, anchors: npt.NDArray[np.uint64]
) -> tuple[Bytes, tuple[int, int, str] | None]:
    """The bytes of lookup.bin; and two samples of one name, and the name, where there are such."""
    lookup = _native.sample_lookup(directory)
    keys = layout.unpack_entries(directory).key
    ascending = np.sort(keys)
    repeated = np.unique(ascending[1:][ascending[1:] == ascending[:-1]])
    if len(repeated):
        table, seen = _native.SampleNames(directory, names, anchors, lookup), dict[bytes, int]()
        for index in np.flatnonzero(np.isin(keys, repeated)).tolist():
            name = table.name(index)
            if (first := seen.setdefault(name, index)) != index:
                return lookup, (first, index, name.decode("utf-8", "backslashreplace"))
    return lookup, None


def joined(parts: tuple[bytes, ...]) -> tuple[Bytes, Numbers]:
    """The parts side by side, and where each ends."""
    ends = np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)))
    return np.frombuffer(b"".join(parts), np.uint8), ends


def _sizes(ends: Numbers, most: int, what: str) -> Numbers:
    sizes = np.diff(ends, prepend=0)
    if len(ends) and (sizes.min() < 0 or ends[-1] > most):
        raise ValueError(f"{what} ends must ascend from 0 and stay within the {most} bytes given")
    return sizes


def with_lengths(names: Bytes, ends: Numbers) -> Bytes:
    """Each name behind its length, a uint16."""
    sizes, count = np.diff(ends, prepend=0), len(ends)
    names = names[: int(ends[-1]) if count else 0]
    made = np.empty(len(names) + 2 * count, np.uint8)
    places = ends - sizes + 2 * np.arange(count)
    is_name = np.ones(len(made), np.bool_)
    is_name[places] = is_name[places + 1] = False
    made[is_name] = names
    made[places], made[places + 1] = sizes & 0xFF, sizes >> 8
    return made
