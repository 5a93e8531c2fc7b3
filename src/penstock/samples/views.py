"""What else than a store samples can come from: a store's samples filtered, or mapped.

Each is a `Source`, as a Store is. A Loader asks it for sequences and batches, and so do mixtures.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidArgument
from penstock.samples.order import Indices, ReplicaShare, Segment, Slots
from penstock.samples.store import Batch, Store

if TYPE_CHECKING:
    from penstock.samples.decode import Sample

_EVALUATED_AT_ONCE = 256  # samples


def checked_source(source: Any) -> Source:
    """The source, unless it is none. Raises InvalidArgument."""
    if isinstance(source, str | os.PathLike):
        mount = f"penstock.samples.mount({str(source)!r})"
        raise InvalidArgument(f"{source} is a path: give the store, {mount}")
    if not all(hasattr(source, name) for name in ("sequence", "bread", "identity")):
        raise InvalidArgument(
            f"a {type(source).__name__} gives no samples: give a store (penstock.samples.mount), or what "
            "filtered, mapped, packed or Mixture make of one"
        )
    checked: Source = source
    return checked


def bread_of(source: Source, sequence: int, n: int) -> Batch | None:
    """The next batch of a source, whose sequence number ``sequence`` must still be the one in progress."""
    if source.sequences != sequence:
        raise InvalidArgument(
            "another iteration has begun on this store, which has one sequence at a time: mount it once "
            "for each Loader that is used at the same time"
        )
    return source.bread(n)


class Iteration(Protocol):
    """One replica's share of an epoch. taken: samples that it has given or left out."""

    taken: int

    def bread(self, n: int) -> Batch | None: ...


class Made(ABC):
    """A source whose epochs are made of those of others.

    identity     of its samples and their order
    encoding     as a store's, which says what Batch.decoded gives
    sequences    how many have begun
    indices_end  one more than the largest index that a batch can have
    """

    identity: str
    encoding: str
    order: str
    slots: Slots
    rank: int
    world_size: int
    indices_end: int
    sequences = 0
    _iteration: Iteration | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _begin(self, share: ReplicaShare) -> Iteration:
        """Raises InvalidArgument."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iteration": None}

    @property
    def taken(self) -> int:
        return 0 if self._iteration is None else self._iteration.taken

    def sequence(
        self,
        *,
        seed: int = 0,
        epoch: int = 0,
        after: Sequence[Segment] = (),
        replica: int | None = None,
        replicas: int | None = None,
        skip: int = 0,
    ) -> None:
        """Begin an epoch, as `Store.sequence` says. Raises InvalidArgument."""
        replicas = self.world_size if replicas is None else replicas
        replica = self.rank if replica is None else replica
        self._iteration = self._begin(ReplicaShare(seed, epoch, after, replica, replicas, skip))
        self.sequences += 1

    def bread(self, n: int) -> Batch | None:
        """The next ``n`` samples of this process's share, as `Store.bread` says."""
        if n < 1:
            raise InvalidArgument(f"a batch of {n} samples cannot be read: ask for 1 or more")
        if self._iteration is None:
            self.sequence()
        assert self._iteration is not None
        return self._iteration.bread(n)


class View:
    """A source that passes on what another gives."""

    encoding: str
    order: str
    rank: int
    world_size: int

    def __init__(self, source: Source, identity: str) -> None:
        self._source, self.identity = source, identity
        self.encoding = source.encoding
        self.order, self.rank, self.world_size = source.order, source.rank, source.world_size

    def __len__(self) -> int:
        return len(self._source)

    @property
    def slots(self) -> Slots:
        return self._source.slots

    @property
    def indices_end(self) -> int:
        return self._source.indices_end

    @property
    def taken(self) -> int:
        return self._source.taken

    @property
    def sequences(self) -> int:
        return self._source.sequences

    def sequence(self, **arguments: Any) -> None:
        """Begin an epoch, as `Store.sequence` says."""
        self._source.sequence(**arguments)

    def bread(self, n: int) -> Batch | None:
        """The next ``n`` samples, as `Store.bread` says."""
        return self._source.bread(n)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._source!r}: {len(self)} samples)"


class Filtered(View):
    """Some samples of a store, made by `filtered`.

    kept   [n] int64: their indices in the store, ascending
    """

    def __init__(self, store: Store, kept: Indices) -> None:
        """`filtered` does this."""
        kept_sum = hashlib.sha256(kept.astype("<i8").tobytes()).hexdigest()
        super().__init__(store, joint_identity("filtered", store.identity, kept_sum))
        self.store, self.kept = store, kept

    def __len__(self) -> int:
        return len(self.kept)

    def sequence(self, **arguments: Any) -> None:
        """Begin an epoch of the samples that are kept, as `Store.sequence` says."""
        self.store.sequence(**arguments, kept=self.kept)


class Mapped(View):
    """A source with a function between its samples and their fields, made by `mapped`."""

    def __init__(self, source: Source, function: Callable[[Sample], Any]) -> None:
        """`mapped` does this."""
        super().__init__(source, source.identity)  # its samples, and their order, are the same
        self.function, self.encoding = function, "mapped"

    def bread(self, n: int) -> Batch | None:
        """The next ``n`` samples, which are mapped when they are decoded."""
        batch = self._source.bread(n)
        return None if batch is None else MappedBatch(batch, self.function)


class MappedBatch(Batch):
    """A batch whose fields are what a function makes of each sample."""

    __slots__ = ("_batch", "_function")

    def __init__(self, batch: Batch, function: Callable[[Sample], Any]) -> None:
        self.indices, self._batch, self._function = batch.indices, batch, function

    @property
    def nbytes(self) -> int:
        return self._batch.nbytes

    @property
    def data(self) -> npt.NDArray[np.uint8]:  # type: ignore[override]
        return self._batch.data

    @property
    def offsets(self) -> npt.NDArray[np.int64]:  # type: ignore[override]
        return self._batch.offsets

    @property
    def labels(self) -> Any:
        return self._batch.labels

    def names(self) -> list[str]:
        return self._batch.names()

    def decoded(self) -> Any:
        """[n] what the function returned. SampleError, which names the sample, where it raised."""
        from penstock.samples.decode import decoded

        return decoded(self._function, self._batch)

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedBatch, (self._batch, self._function)


# What a Loader reads, by `sequence` and `bread`: one sequence at a time.
Source: TypeAlias = "Store | View | Made"


def mapped(source: Source, function: Callable[[Sample], Any]) -> Mapped:
    """The samples of a source, each turned into what a function makes of it.

    source     a Store, or what filtered, packed or Mixture return
    function   pure: of a `Sample` anything, which becomes its ``fields``. It runs where samples are decoded:
               in a Loader's threads, or a DataLoader's workers

    Which samples come, and their order, stay, so a position remains one whatever the function. Stores of
    different formats become alike so, for one Mixture. Raises InvalidArgument.
    """
    if not callable(function):
        raise InvalidArgument(f"a map is a function of a sample, not a {type(function).__name__}")
    return Mapped(checked_source(source), function)


def filtered(store: Store, keep: Callable[[Sample], bool] | npt.ArrayLike) -> Filtered:
    """The samples of a store that ``keep`` holds for, in an order of their own.

    store   as mounted
    keep    [samples] bool, such as ``store.labels == 3`` or ``store.sizes(range(len(store))) > 100``; or a
            pure function of a `Sample`, which is called here once for each, by reading the store once.
            ``Filtered.kept`` can be saved: give it again, as indices, to do without that

    Epochs are divided, shuffled and resumed as if the store held nothing else: batches are whole, and chunks
    without such samples are not read. All processes must keep the same. Raises InvalidArgument where nothing
    is kept; what reading raises.
    """
    if not isinstance(store, Store):
        checked_source(store)
        raise InvalidArgument(f"a {type(store).__name__} cannot be filtered: filter its stores, then make it")
    if callable(keep):
        from penstock.samples.decode import decoded

        chosen = evaluated(store, partial(decoded, lambda sample: bool(keep(sample))), bool)
    else:
        chosen = np.asarray(keep)
    if chosen.dtype == bool and chosen.shape == (len(store),):
        chosen = np.flatnonzero(chosen)
    elif chosen.dtype == bool or chosen.ndim != 1:
        raise InvalidArgument(
            f"keep= is of shape {chosen.shape} and dtype {chosen.dtype}: give one bool for each of "
            f"{len(store)} samples, or their indices"
        )
    kept = np.unique(store.indices(chosen)).astype(np.int64)
    if not len(kept):
        raise InvalidArgument(f"the filter keeps none of {len(store)} samples: change it, or leave it out")
    return Filtered(store, kept)


def evaluated(source: Source, of_batch: Callable[[Batch], list[Any]], dtype: type) -> npt.NDArray[Any]:
    """[indices_end]: what a function says of each sample, by index; 0 for those that are left out."""
    values: npt.NDArray[Any] = np.zeros(source.indices_end, dtype)
    source.sequence(replica=0, replicas=1)
    while (batch := source.bread(_EVALUATED_AT_ONCE)) is not None:
        values[batch.indices] = of_batch(batch)
    return values


def joint_identity(*parts: str) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]
