"""Samples that were read together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.tables import html_table
from penstock.errors import InvalidFile
from penstock.samples.format.encoding import Decoder
from penstock.samples.format.manifest import Field
from penstock.units import format_bytes

SHOWN = 10  # samples of a batch, in a notebook

Labels = npt.NDArray[np.int32]


class Origin(Protocol):
    """What a batch asks when more than bytes is wanted of it: the store that it was read from."""

    @property
    def decoder(self) -> Decoder: ...
    def labels_of(self, indices: npt.NDArray[np.int64]) -> Labels | None: ...
    def names_of(self, indices: npt.NDArray[np.int64]) -> list[str]: ...


class Batch:
    """Samples in one buffer.

    ``batch[i]`` are the bytes of the i-th, without a copy. The memory is the batch's alone, and is reused
    once nobody holds it or an array of it.

    indices   [n] int64: which samples
    data      uint8: their bytes, back to back
    offsets   [n + 1] int64: sample i is data[offsets[i]:offsets[i + 1]]
    """

    __slots__ = ("_origin", "data", "indices", "offsets")

    def __init__(
        self,
        indices: npt.NDArray[np.int64],
        data: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        origin: Origin,
    ) -> None:
        self.indices, self.data, self.offsets, self._origin = indices, data, offsets, origin

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> memoryview:
        at = range(len(self.indices))[place]  # IndexError, and negative places count from the end
        return self.data.data[int(self.offsets[at]) : int(self.offsets[at + 1])]

    def __iter__(self) -> Iterator[memoryview]:
        view, offsets = self.data.data, self.offsets.tolist()
        return (view[begin:end] for begin, end in pairwise(offsets))

    @property
    def labels(self) -> Labels | None:
        """[n]: the class of each, -1 for none. None where the store has no classes."""
        return self._origin.labels_of(self.indices)

    def names(self) -> list[str]:
        """The name of each."""
        return self._origin.names_of(self.indices)

    def decoded(self) -> Any:
        """The samples' fields, as the store's encoding says.

        "record": a dict of arrays [n, ...], without a copy. Otherwise a list: of bytes for "raw", of dicts
        for "msgpack". Raises InvalidFile, which names the sample, where one cannot be decoded.
        """
        try:
            return self._origin.decoder.batch(self.data, self.offsets)
        except InvalidFile:
            for index, name, data in zip(self.indices.tolist(), self.names(), self, strict=True):
                try:
                    self._origin.decoder.sample(data)
                except InvalidFile as error:
                    raise InvalidFile(f"sample {index} ({name!r}) cannot be decoded: {error}") from None
            raise

    def __repr__(self) -> str:
        return f"Batch({len(self)} samples, {self.data.nbytes} bytes)"

    def _repr_html_(self) -> str:
        """In a notebook: the first samples."""
        shown = slice(0, SHOWN)
        indices, sizes = self.indices[shown], np.diff(self.offsets[: SHOWN + 1]).tolist()
        columns = {"index": [str(index) for index in indices], "size": [format_bytes(size) for size in sizes]}
        columns["name"] = self._origin.names_of(indices)
        if (labels := self._origin.labels_of(indices)) is not None:
            columns["class"] = [str(label) for label in labels]
        more = f", the first {SHOWN} of them" if len(self) > SHOWN else ""
        title = f"penstock batch: {len(self):,} samples, {format_bytes(self.data.nbytes)}{more}"
        return html_table(zip(*columns.values(), strict=True), tuple(columns), title)

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process goes the batch, not the store."""
        decoder = self._origin.decoder
        carried = self.labels, self.names(), decoder.encoding, decoder.fields
        return _received, (self.indices, self.data, self.offsets, *carried)


class _Carried:
    """What a batch from another process knows: of its own samples only."""

    def __init__(
        self, indices: npt.NDArray[np.int64], labels: Labels | None, names: list[str], decoder: Decoder
    ) -> None:
        self.decoder = decoder
        self._places = {index: place for place, index in enumerate(indices.tolist())}
        self._labels, self._names = labels, names

    def labels_of(self, indices: npt.NDArray[np.int64]) -> Labels | None:
        return None if self._labels is None else self._labels[self._at(indices)]

    def names_of(self, indices: npt.NDArray[np.int64]) -> list[str]:
        return [self._names[place] for place in self._at(indices)]

    def _at(self, indices: npt.NDArray[np.int64]) -> list[int]:
        return [self._places[index] for index in indices.tolist()]


def _received(
    indices: npt.NDArray[np.int64],
    data: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    labels: Labels | None,
    names: list[str],
    encoding: str,
    fields: tuple[Field, ...],
) -> Batch:
    return Batch(indices, data, offsets, _Carried(indices, labels, names, Decoder(encoding, fields)))
