"""Samples from Python: any iterable of bytes or fields, with or without names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidArgument
from penstock.samples.encoding import encode
from penstock.samples.layout import bytes_of
from penstock.samples.sources.source import RawSample, Source, check_label

_ACCEPTED = "give (name, bytes), (name, fields), (name, bytes or fields, label), bytes or fields"


@dataclass(frozen=True)
class Items(Source):
    """What an iterable gives, encoded. Several processes take turns, an item each."""

    again: Callable[[], Iterator[Any]]
    whole: int | None

    @property
    def samples(self) -> int | None:
        return None if self.whole is None else len(range(self.rank, self.whole, self.world_size))

    def __iter__(self) -> Iterator[RawSample]:
        mine = itertools.islice(enumerate(self.again()), self.rank, None, self.world_size)
        for position, item in mine:
            yield self._encoded(item, position)

    def _encoded(self, item: Any, position: int) -> RawSample:
        name, value, label = _split(item, position)
        encoding = _encoding_of(value, name)
        if encoding != self.encoding:
            raise InvalidArgument(
                f"sample {name!r} is {_WORDS[encoding]}, but the first was {_WORDS[self.encoding]}: "
                "all samples of a store are of one kind"
            )
        if label != -1:
            check_label(label, self.classes, name)
        if isinstance(value, Mapping):
            try:
                return RawSample(name, encode(value), label)
            except InvalidArgument as error:
                raise InvalidArgument(f"sample {name!r}: {error}") from None
        return RawSample(name, bytes_of(value) if isinstance(value, str) else value, label)


_WORDS = {"raw": "bytes", "msgpack": "fields"}


def open_iterable(
    source: Iterable[Any] | Callable[[], Iterable[Any]], *, classes: Sequence[str] = ()
) -> Items:
    """Samples of an iterable, or of a function that returns one.

    source   gives (name, bytes), (name, text), (name, fields), or these with a label at the end, or bytes or
             fields, which are named by their running number. The first decides whether samples are bytes or
             fields. To resume packing, it must give the same samples in the same order again: a generator
             gives them once, so pass the function that makes it
    classes  what labels count

    Raises InvalidArgument for anything else.
    """
    again = _again(source)
    items = again()
    first = next(items, None)
    if items is source:  # it goes on behind the first
        again = _once(items if first is None else itertools.chain([first], items))
    encoding = "raw"
    if first is not None:
        name, value, _ = _split(first, 0)
        encoding = _encoding_of(value, name)
    whole = len(source) if isinstance(source, Sized) else None
    return Items(f"{type(source).__name__} in Python", encoding, tuple(classes), again, whole)


def _again(source: Any) -> Callable[[], Iterator[Any]]:
    if isinstance(source, Iterable):
        return lambda: iter(source)
    if not callable(source):
        raise InvalidArgument(
            f"an object of type {type(source).__name__} gives no samples: give an iterable, or a path"
        )
    return lambda: iter(source())


def _once(items: Iterator[Any]) -> Callable[[], Iterator[Any]]:
    left = [items]

    def again() -> Iterator[Any]:
        if not left:
            raise InvalidArgument(
                "this iterator was read already, and gives its samples only once: pass the function that "
                "makes it, or a list"
            )
        return left.pop()

    return again


def _split(item: Any, position: int) -> tuple[str, Any, int]:
    """Name, value and label of what an iterable gave."""
    if isinstance(item, RawSample):
        return item
    if isinstance(item, tuple) and len(item) in (2, 3) and isinstance(item[0], str):
        label = item[2] if len(item) == 3 else -1
        if not hasattr(label, "__index__"):
            raise InvalidArgument(f"sample {item[0]!r} has the label {label!r}: labels are integers")
        return item[0], item[1], label.__index__()
    if isinstance(item, bytes | bytearray | memoryview | Mapping):
        return str(position), item, -1
    raise InvalidArgument(f"item {position} is of type {type(item).__name__}: {_ACCEPTED}")


def _encoding_of(value: Any, name: str) -> str:
    if isinstance(value, Mapping):
        return "msgpack"
    if isinstance(value, bytes | bytearray | memoryview | str):
        return "raw"
    raise InvalidArgument(f"sample {name!r} is of type {type(value).__name__}: {_ACCEPTED}")
