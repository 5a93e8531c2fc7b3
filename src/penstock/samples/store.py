"""A mounted store: what programs read samples from, and the batches that it gives.

Its functions are those of DLFS, section III.
"""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from penstock import _native
from penstock.core.tables import html_table
from penstock.errors import InvalidArgument, InvalidFile, SampleError
from penstock.samples.catalog import Catalog, Directory, Key, Keys, Labels, identity_of, load_all
from penstock.samples.encoding import Decoder
from penstock.samples.failures import CLOSED, Failure, cannot_read
from penstock.samples.layout import buffer_bytes
from penstock.samples.objects.cache import CacheOptions
from penstock.samples.order import CacheShape, ReplicaShare, Segment, cache_shape, order_of
from penstock.samples.places import PathLike
from penstock.samples.reading import EpochReader, Options
from penstock.storage.files import Closing
from penstock.units import format_bytes, parse_bytes

SHOWN = 10  # samples of a batch, in a notebook


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
        origin: Catalog | _BatchOrigin,
    ) -> None:
        self.indices, self.data, self.offsets, self._origin = indices, data, offsets, origin

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def nbytes(self) -> int:
        """Bytes of the samples."""
        return self.data.nbytes

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
        columns["name"] = self.names()[shown]
        if (labels := self.labels) is not None:
            columns["class"] = [str(label) for label in labels[shown]]
        more = f", the first {SHOWN} of them" if len(self) > SHOWN else ""
        title = f"penstock batch: {len(self):,} samples, {format_bytes(self.data.nbytes)}{more}"
        return html_table(zip(*columns.values(), strict=True), tuple(columns), title)

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process goes the batch, not the store."""
        origin = _BatchOrigin(self._origin.decoder, self.labels, self.names())
        return Batch, (self.indices, self.data, self.offsets, origin)


@dataclass(frozen=True)
class _BatchOrigin:
    """What a batch from another process knows: of its own samples only."""

    decoder: Decoder
    labels: Labels | None
    names: list[str]

    def labels_of(self, indices: npt.NDArray[np.int64]) -> Labels | None:
        return self.labels

    def names_of(self, indices: npt.NDArray[np.int64]) -> list[str]:
        return self.names


logger = logging.getLogger("penstock")


def mount(
    path: PathLike | Sequence[PathLike],
    order: str = "chunk",
    cache_bytes: int | str = "256MiB",
    rank: int = 0,
    world_size: int = 1,
    *,
    group: Any = None,
    served_at: str | None = None,
    io: str = "auto",
    verify: bool = True,
    on_damage: str = "raise",
    prefetch_bytes: int | str = "32MiB",
    timeout_s: float = 60.0,
    copy_threads: int | None = None,
    cache_dir: PathLike | None = None,
    cache_disk: int | str = "50GiB",
) -> Store:
    """Open a sample store for reading.

    path            a store, the folder in which several processes packed their partitions, the URL of a
                    namespace that one was uploaded to (``nvme+tcp://HOST:PORT/NQN?ns=1``), or of objects
                    (``s3://BUCKET/PREFIX``, ``gs://``, ``az://``, ``https://``), or a list of such: their
                    samples are counted through, in that order
    order           of `Store.sequence`: "chunk" reads whole chunks, and mixes those that `cache_bytes` hold;
                    "full" is a permutation of all samples, each read by itself
    cache_bytes     memory for chunks, such as "256MiB"
    rank, world_size  which of how many processes this is: `Store.bread` gives it its share
    group           of torch.distributed: all its processes mount together, each what it can see, and every
                    one has all samples; rank and world_size are those of the group
    served_at       with `group`: the URL at which this machine serves `path` (`serve`): the other processes
                    read it there, and need no file system in common
    io              of folders, "buffered": through the page cache; "direct": past it; "auto": past it where
                    the samples would not fit in half of the available memory
    verify          compare checksums of everything that is read
    on_damage       of samples of a batch: "raise", or "skip" them, log that, and list them in `Store.damaged`
    prefetch_bytes  of batches that are made ready ahead of `Store.bread`
    timeout_s       longest wait for a read, after which SampleError says what was waited for. A target that
                    is lost is tried again for half of it
    copy_threads    that copy samples into batches besides the one that assembles them; None: as many as pay
    cache_dir       a folder of a local disk that keeps what was fetched from object stores, for all processes
                    of this machine and later mounts; None: nothing is kept
    cache_disk      most that it may take there

    Raises SampleError where there is no store, or one that cannot be read; InvalidFile for a damaged one;
    InvalidArgument.
    """
    cache = None
    if cache_dir is not None:
        cache = CacheOptions(os.path.abspath(cache_dir), parse_bytes(cache_disk))
    if group is not None:
        from penstock.samples.collective import gather

        directories, rank, world_size = gather(
            path, group, served_at=served_at, verify=verify, timeout_s=timeout_s, cache=cache
        )
    elif served_at is not None:
        raise InvalidArgument("served_at= is for other processes: give group=, or mount the URL itself")
    options = Options(
        order=order,
        cache_bytes=parse_bytes(cache_bytes),
        rank=operator.index(rank),
        world_size=operator.index(world_size),
        io=io,
        verify=verify,
        on_damage=on_damage,
        prefetch_bytes=parse_bytes(prefetch_bytes),
        timeout_s=float(timeout_s),
        copy_threads=copy_threads,
        cache=cache,
    )
    if group is None:
        directories = load_all(path, verify, timeout_s, cache)
    return Store(directories, options)


class Store(Catalog, Closing):
    """A mounted sample store, made by `mount`. A context manager.

    Several threads can use it at once; those that call `bread` take turns. It can be pickled: whoever gets it
    mounts it anew. After a fork the child uses it as if it had mounted it, and calls `sequence` again.

    order        "full" or "chunk"
    rank, world_size  whose share `bread` gives
    io           "buffered" or "direct"; io_reason says why
    shape        how the cache is used
    """

    def __init__(self, directories: Sequence[Directory], options: Options) -> None:
        """`mount` does this."""
        super().__init__(directories)
        self._options = options
        self.order, self.rank, self.world_size = options.order, options.rank, options.world_size
        chunks = sum(manifest.chunks for manifest in self.manifests)
        buffers = min(options.cache_bytes // buffer_bytes(self.chunk_bytes), chunks)
        self.shape = CacheShape(0, 0)
        if options.order == "chunk":
            self.shape = cache_shape(options.cache_bytes, self.chunk_bytes, chunks, len(directories))
            buffers = self.shape.slots + self.shape.ahead
        self._damaged: set[int] = set()
        self._turn = threading.RLock()  # of sequence and bread
        self._reading = EpochReader(self.directories, options, buffers)
        self.io, self.io_reason = self._reading.io_path
        self._finalizer = weakref.finalize(self, self._reading.close)
        _mounted.add(self)

    @property
    def indices_end(self) -> int:
        """One more than the largest index."""
        return self._samples

    @property
    def slots(self) -> int:
        """Chunks that a sequence mixes; 0 in full order."""
        return self.shape.slots

    @property
    def damaged(self) -> list[int]:
        """Indices of samples that were left out so far, ascending, with on_damage="skip"."""
        return sorted(self._damaged)

    def counters(self) -> dict[str, int]:
        """What this process has read so far."""
        return self._reading.counters()

    # Reading one, or some

    def read(self, key: Key) -> bytes:
        """The bytes of a sample, by name or index. Raises SampleError where it is damaged."""
        index = self.index(key)
        try:
            return self._reading.reader().read(index, self._options.timeout_s)
        except _native.SampleFailure as failure:
            raise self._error(failure) from None

    def read_many(self, keys: Keys) -> Batch:
        """The samples of these names or indices, in this order. All reads are in flight at once.

        Raises SampleError where one is damaged, also with on_damage="skip".
        """
        indices = self.indices(keys)
        try:
            return Batch(*self._reading.reader().gather(indices, self._options.timeout_s), self)
        except _native.SampleFailure as failure:
            raise self._error(failure) from None

    def open(self, key: Key) -> BinaryIO:
        """The sample as a binary file object, in memory: its checksum is that of all its bytes."""
        return io.BytesIO(self.read(key))

    def sample(self, key: Key) -> bytes | dict[str, Any]:
        """The sample, decoded: bytes for "raw", else its fields. Raises InvalidFile where it cannot be."""
        index = self.index(key)
        try:
            return self.decoder.sample(self.read(index))
        except InvalidFile as error:
            raise InvalidFile(f"sample {index} ({self.name(index)!r}) cannot be decoded: {error}") from None

    # Reading all, in a random order

    def sequence(
        self,
        *,
        seed: int = 0,
        epoch: int = 0,
        after: Sequence[Segment] = (),
        replica: int | None = None,
        replicas: int | None = None,
        skip: int = 0,
        kept: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Begin an epoch: decide the order in which `bread` gives samples.

        The order is a pure function of the arguments, the store, `order`, and in chunk order `shape.slots`.

        after     what was taken of this epoch while it was divided otherwise: only the rest comes
        replica   which of ``replicas`` disjoint shares this is; by default rank and world_size
        skip      samples at the beginning of the share that are left out
        kept      [n] int64, ascending: the epoch is of these samples only

        Raises InvalidArgument.
        """
        replicas = self.world_size if replicas is None else replicas
        share = ReplicaShare(seed, epoch, after, self.rank if replica is None else replica, replicas, skip)
        firsts = self.firsts if self.order == "chunk" else np.empty(0, np.uint64)
        samples, chosen = self._samples, None
        if kept is not None:  # numbered through, chunk by chunk
            chosen = kept[: np.searchsorted(kept, samples)].astype(np.uint64)
            firsts, samples = np.searchsorted(chosen, firsts).astype(np.uint64), len(chosen)
        order = order_of(self.order, samples, share, firsts, self.shape.slots, chosen)
        with self._turn:
            try:
                self._reading.begin(order, self.shape.ahead)
            except _native.SampleFailure as failure:  # closed meanwhile, or no thread
                raise self._error(failure) from None

    def bread(self, n: int) -> Batch | None:
        """The next ``n`` samples of this process's share, fewer at its end, then None.

        Without a call of `sequence`, that of seed 0 and epoch 0. With on_damage="skip" a batch can be smaller
        by the samples that were left out.

        Raises SampleError for a damaged sample, or one that does not come in time; InvalidArgument.
        """
        if n < 1:
            raise InvalidArgument(f"a batch of {n} samples cannot be read: ask for 1 or more")
        with self._turn:
            feed = self._reading.feed or self._begin()
            while (batch := self._bread(feed, n)) is not None and not len(batch[0]):
                pass  # all of it was damaged
            self._reading.warn_without_io_uring()
        return None if batch is None else Batch(*batch, self)

    @property
    def taken(self) -> int:
        """Samples of the sequence that `bread` has given or left out."""
        feed = self._reading.feed
        return 0 if feed is None else feed.taken

    @property
    def replica_size(self) -> int:
        """Samples of the sequence in all."""
        if self._reading.epoch_size is None:
            raise InvalidArgument("no epoch was begun, whose size could be told: call sequence() first")
        return self._reading.epoch_size

    @property
    def sequences(self) -> int:
        """Number of sequences begun so far: it has changed where another one has replaced yours."""
        return self._reading.epochs

    # Closing, pickling, forking

    def close(self) -> None:
        """Close all files and release all memory, except that of batches still in use. Idempotent."""
        self._finalizer()

    def __reduce__(self) -> tuple[Any, ...]:
        places = [str(directory.place) for directory in self.directories]
        return _remount, (places, self.identity, self._options)

    def __repr__(self) -> str:
        place = self.directories[0].place
        more = f" and {len(self.directories) - 1} more" if len(self.directories) > 1 else ""
        return f"Store({str(place)!r}{more}: {self._samples} samples, order={self.order!r})"

    def _bread(self, feed: _native.SampleFeed, n: int) -> tuple[Any, Any, Any] | None:
        try:
            batch = feed.bread(n, self._options.timeout_s)
            skipped = feed.skipped() if self._options.on_damage == "skip" else []
        except _native.SampleFailure as failure:
            raise self._error(failure) from None
        if skipped and not self._reading.is_closed:  # which cancels reads
            self._log_damage(skipped)
        return batch

    def _begin(self) -> _native.SampleFeed:
        self._reading.reader()  # SampleError where it was closed
        if self._reading.epoch_is_in_parent:
            raise InvalidArgument(
                "this process was forked during an epoch, which goes on in its parent: call sequence()"
            )
        self.sequence()
        if self._reading.feed is None:  # closed meanwhile
            raise SampleError(CLOSED)
        return self._reading.feed

    def _error(self, failure: _native.SampleFailure) -> SampleError:
        what = Failure(*failure.args)
        if self._reading.is_closed:  # which cancels reads
            what = what._replace(kind="closed")
        directory = self.directories[what.partition]
        whose = "a chunk's samples"
        if what.sample >= 0:
            whose = f"sample {what.sample}"
            with contextlib.suppress(InvalidFile, SampleError):  # the names may be damaged, too
                whose += f" ({self._names[what.sample]!r})"
        chunk_bytes = directory.manifest.chunk_bytes
        return cannot_read(what, directory.place, chunk_bytes, whose, self._options.timeout_s)

    def _log_damage(self, skipped: Sequence[int]) -> None:
        if not self._damaged:
            logger.warning(
                "%s: sample %d is damaged and was left out, as will be others. Store.damaged lists them; "
                "`penstock samples verify` looks for all.",
                self.directories[0].place,
                skipped[0],
            )
        self._damaged.update(skipped)


def _remount(places: Sequence[str], identity: str, options: Options) -> Store:
    directories = load_all(places, options.verify, options.timeout_s, options.cache)
    if identity_of([directory.manifest for directory in directories]) != identity:
        raise SampleError(
            f"{places[0]} holds other samples than when it was mounted in the process that sent it here: "
            "mount it again there"
        )
    return Store(directories, options)


_mounted: weakref.WeakSet[Store] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_mounted):
        store._turn = threading.RLock()
        store._reading.after_fork()


os.register_at_fork(after_in_child=_after_fork)
