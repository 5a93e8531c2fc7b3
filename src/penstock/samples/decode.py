"""Decoding: batches of a store become tensors, decoded samples, or tensors in pinned memory."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from penstock.errors import InvalidArgument, PenstockError, SampleError
from penstock.samples.store import Batch
from penstock.samples.threads import DaemonThreads
from penstock.units import format_bytes, format_seconds

Convert = Callable[[Batch], Any]


class Sample:
    """One sample of a batch, as a decode function gets it. All but ``data`` is looked up when asked for."""

    __slots__ = ("_batch", "_place", "_shared")

    def __init__(self, batch: Batch, place: int, shared: dict[str, Any]) -> None:
        self._batch, self._place, self._shared = batch, place, shared

    @property
    def data(self) -> memoryview:
        """Its bytes, without a copy."""
        return self._batch[self._place]

    @property
    def index(self) -> int:
        """Its place in the store."""
        return int(self._batch.indices[self._place])

    @property
    def label(self) -> int:
        """Its class; -1: none."""
        labels = self._once("labels", lambda: self._batch.labels)
        return -1 if labels is None else int(labels[self._place])

    @property
    def name(self) -> str:
        names: list[str] = self._once("names", self._batch.names)
        return names[self._place]

    @property
    def fields(self) -> Any:
        """Its fields by name, where the store's encoding is "record" or "msgpack"; bytes for "raw"."""
        decoded = self._once("decoded", self._batch.decoded)
        if isinstance(decoded, dict):
            return {name: array[self._place] for name, array in decoded.items()}
        return decoded[self._place]

    def _once(self, what: str, make: Callable[[], Any]) -> Any:
        if what not in self._shared:
            self._shared[what] = make()
        return self._shared[what]


def converter(
    encoding: str,
    decode: Callable[[Sample], Any] | None,
    decode_batch: Convert | None,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> Convert:
    """What makes a batch of this encoding into what is delivered.

    Raises InvalidArgument where both decode functions are given.
    """
    if decode is not None and decode_batch is not None:
        raise InvalidArgument("decode= makes one sample, decode_batch= a whole batch: give one of them")
    if decode_batch is not None:
        return decode_batch
    if decode is None and collate_fn is None:
        return functools.partial(to_tensors, encoding)
    each, join = decode or (lambda sample: sample.fields), collate_fn or default_collate
    return lambda batch: join(decoded(each, batch))


def decoded(decode: Callable[[Sample], Any], batch: Batch) -> list[Any]:
    """What the function makes of each sample. Raises SampleError, which names the sample, where it raises."""
    values: list[Any] = []
    shared: dict[str, Any] = {}  # names, labels and fields, which are looked up for all samples together
    for place in range(len(batch)):
        sample = Sample(batch, place, shared)
        try:
            values.append(decode(sample))
        except PenstockError:
            raise
        except Exception as error:
            raise SampleError(
                f"sample {sample.index} ({sample.name!r}) could not be decoded: "
                f"{type(error).__name__}: {error}"
            ) from error
    return values


def to_tensors(encoding: str, batch: Batch) -> Any:
    """A batch as tensors, by the store's encoding.

    "raw"      data (uint8, the samples back to back), offsets ([n + 1] int64), indices ([n] int64); no copies
    "record"   the fields, [n, *shape] each; no copies where fields can be tensors where they lie
    "msgpack"  the fields, joined by torch's default_collate
    "mapped"   what the function of a Mapped returned, joined so; nothing is added
    "mixed"    of a Mixture of several encodings: what their samples are, joined so

    Where the store has classes also labels ([n] int64), unless a field is called so.
    """
    if encoding == "raw":
        tensors: dict[str, Any] = {
            "data": torch.from_numpy(batch.data),
            "offsets": torch.from_numpy(batch.offsets),
            "indices": torch.from_numpy(batch.indices),
        }
    elif encoding == "record":
        tensors = _joined(batch.decoded())
    else:
        tensors = _joined(batch.decoded())
        if encoding == "mapped" or not isinstance(tensors, dict):
            return tensors
    labels = batch.labels
    if labels is not None and "labels" not in tensors:
        tensors["labels"] = torch.from_numpy(labels.astype(np.int64))
    return tensors


def _joined(samples: list[Any] | dict[str, Any]) -> Any:
    if isinstance(samples, dict):  # sources of a Mixture that have the same fields
        return {name: as_tensor(array) for name, array in samples.items()}
    try:
        return default_collate([_with_tensors(sample) for sample in samples])
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        raise InvalidArgument(
            f"samples of a batch cannot be joined into tensors: {error}. Give the Loader collate_fn=, which "
            "gets their list (collate_fn=list leaves it as it is), or decode="
        ) from error


def _with_tensors(value: Any) -> Any:
    """Arrays as tensors, which default_collate joins; it warns of arrays that cannot be written to."""
    if isinstance(value, np.ndarray):
        return as_tensor(value)
    if isinstance(value, dict):
        return {name: _with_tensors(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_tensors(each) for each in value]
    return value


def as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """The array as a tensor where it lies, or a copy where torch cannot use it so."""
    usable = array.flags.writeable and array.flags.aligned and all(step >= 0 for step in array.strides)
    if not usable or any(step % array.itemsize for step in array.strides):
        array = np.array(array, order="C")
    return torch.from_numpy(array)


def pinned(value: Any) -> Any:
    """The same with every tensor in pinned memory."""
    if isinstance(value, torch.Tensor) or hasattr(value, "pin_memory"):
        return value.pin_memory()
    if isinstance(value, Mapping):
        return {name: pinned(each) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(pinned, value))
    if isinstance(value, list | tuple):
        return type(value)(map(pinned, value))
    return value


def size_of(value: Any) -> int:
    """Bytes of the tensors and arrays in a value."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.nbytes)
    if isinstance(value, bytes | bytearray | memoryview):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(size_of, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return sum(map(size_of, value))
    return 0


class DecodeThreads:
    """Decodes batches ahead of the consumer, which gets them in order.

    decoded_bytes   most that is ready or under way, as batches or as what becomes of them; at least one batch
    timeout_s       longest wait for one batch
    """

    def __init__(self, convert: Convert, threads: int, decoded_bytes: int, timeout_s: float) -> None:
        self.threads, self._decoded_bytes, self._timeout_s = threads, decoded_bytes, timeout_s
        self._convert = convert
        self._pool = DaemonThreads("penstock-decode", threads)
        self._given: collections.deque[tuple[Future[tuple[Any, int]], int, int, int]] = collections.deque()
        self._held_bytes = 0
        self._growth = 1.0  # from a batch to what becomes of it, as the last one did

    def __len__(self) -> int:
        """Batches ready or under way."""
        return len(self._given)

    def has_room(self) -> bool:
        """Whether another batch may be given."""
        return not self._given or self._held_bytes < self._decoded_bytes

    def give(self, batch: Batch, taken: int) -> None:
        """taken: samples that the iteration has given with this batch."""
        cost_bytes = int(batch.nbytes * max(1.0, self._growth))
        self._held_bytes += cost_bytes
        future = self._pool.submit(_converted, self._convert, batch)
        self._given.append((future, batch.nbytes, cost_bytes, taken))

    def take(self) -> tuple[Any, int]:
        """What became of the next batch, and how many samples the iteration has given with it.

        Raises what the decode function raised; SampleError after timeout_s.
        """
        future, batch_bytes, cost_bytes, taken = self._given.popleft()
        try:
            value, value_bytes = future.result(self._timeout_s)
        except FutureTimeout as error:
            if future.done():
                raise  # the decode function's own
            raise SampleError(
                f"waited {format_seconds(self._timeout_s)} for a batch of {format_bytes(batch_bytes)} to be "
                f"decoded by {self.threads} threads: it hangs, or needs more decode_timeout_s"
            ) from error
        self._held_bytes -= cost_bytes
        self._growth = value_bytes / max(1, batch_bytes)
        return value, taken

    def close(self) -> None:
        """Let the threads go, once they are done with what they have begun."""
        self._pool.cancel()
        self._given.clear()
        self._pool.close()


def _converted(convert: Convert, batch: Batch) -> tuple[Any, int]:
    value = convert(batch)
    return value, size_of(value)
