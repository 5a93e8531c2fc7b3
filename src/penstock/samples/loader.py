"""Samples for training: PyTorch's data sets over a store.

A Loader reads, shuffles and batches in C++, in the background, and needs no worker processes; it also works
in those of a DataLoader. It stops and goes on exactly, with any number of processes and workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from penstock.core.log import log_once
from penstock.errors import InvalidArgument
from penstock.samples.decode import Convert, DecodeThreads, Sample, converter, decoded, pinned
from penstock.samples.epochs import Epoch, EpochCoordinator, Position, from_state
from penstock.samples.order import Slots
from penstock.samples.store import Batch, Store
from penstock.samples.views import Source, bread_of, checked_source
from penstock.units import parse_bytes


class Loader(IterableDataset[Any]):  # type: ignore[misc]
    """Batches of a store, one epoch of this process an iteration.

    store           as mounted, or what filtered, mapped, packed or Mixture make of one: its order, rank and
                    world_size are the Loader's
    batch_size      samples of a batch
    decode          makes a Sample into anything; the batch is what ``collate_fn`` makes of their list
    decode_batch    makes a whole Batch into anything: the fast way
    collate_fn      torch's default_collate unless given
    seed            of the order; the same in all processes
    drop_last       every worker gives the same number of whole batches, so that all processes make equally
                    many steps; fewer than ``world_size * workers * batch_size`` samples are left out
    num_threads     number of threads that decode ahead, in order; 0 decodes when a batch is asked for
    pin_memory      deliver tensors in pinned memory, where there is an accelerator
    decoded_bytes   most that the threads hold decoded or under way
    workers         of the DataLoader that will read this, for len() before they have begun
    decode_timeout_s  longest wait for a batch to be decoded by a thread

    Without a decode function a batch is a dict of tensors, as `to_tensors` in decode.py says.

    Iterate it directly, or give it to ``DataLoader(loader, batch_size=None, num_workers=N)``: then each
    worker reads a shard of its own, with its own cache and threads. Each iteration is the next
    epoch, unless set_epoch says which. An interrupted epoch starts again from the beginning unless you load
    its state. Where several processes train together, call set_epoch, or let all iterate equally often.

    Raises InvalidArgument for arguments that cannot be used.
    """

    def __init__(
        self,
        store: Source,
        batch_size: int,
        *,
        decode: Callable[[Sample], Any] | None = None,
        decode_batch: Convert | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
        drop_last: bool = False,
        num_threads: int = 0,
        pin_memory: bool = False,
        decoded_bytes: int | str = "64MiB",
        workers: int | None = None,
        decode_timeout_s: float = 120.0,
    ) -> None:
        checked_source(store)
        if batch_size < 1 or num_threads < 0:
            raise InvalidArgument(
                f"batch_size={batch_size} and num_threads={num_threads}: give at least 1 and 0"
            )
        converter(store.encoding, decode, decode_batch, collate_fn)
        self.store = store
        self.batch_size, self.seed, self.drop_last = batch_size, seed, drop_last
        self.num_threads, self.pin_memory, self.decode_timeout_s = num_threads, pin_memory, decode_timeout_s
        self.decoded_bytes = parse_bytes(decoded_bytes)
        self._functions = decode, decode_batch, collate_fn
        self._workers = workers
        self._epochs = EpochCoordinator()
        self._loaded: Position | None = None
        self._has_worker_state = False  # _loaded came in a worker, and is that of its own shard
        self._progress: _Progress | None = None
        self._ordinals: dict[int, int] = {}  # iterations in this worker, by base seed

    def __repr__(self) -> str:
        return (
            f"<penstock.samples.Loader of {self.store!r}, batches of {self.batch_size}, epoch {self.epoch}>"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_progress": None, "_ordinals": {}}

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration will be of."""
        return self._epochs.next

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one. A position of this epoch that was loaded stays."""
        keeps = self._loaded is not None and self._epochs.resumes and epoch == self._loaded.of.epoch
        self._epochs.set(epoch, keeps)
        if self._progress is not None and self._progress.finished:
            self._progress = None

    def __len__(self) -> int:
        """Batches of a whole epoch in this process."""
        workers = max(1, self._epochs.workers if self._workers is None else self._workers)
        position = self._fresh(0).divided(self.store.world_size * workers, self._slots, workers)
        ends = map(position.end, position.of_rank(self.store.rank))
        return sum(-(-end // self.batch_size) for end in ends)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None and self._has_worker_state and self._loaded is not None:
            position, replica = self._from_worker_state(self._loaded, info.num_workers)
        else:
            position, replica = self._next_position(info)
        convert = converter(self.store.encoding, *self._functions)
        if self.pin_memory:
            if info is not None:
                log_once("pin_memory=True of a Loader has no effect in a worker: give it to the DataLoader")
            elif torch.accelerator.is_available():
                convert = _pinning(convert)
            else:
                log_once("pin_memory=True of a Loader has no effect: there is no accelerator")
        iteration = _Iteration(self, position, replica, convert)
        self._progress = iteration.progress
        return iteration

    def _next_position(self, info: Any) -> tuple[Position, int]:
        """Position and replica of an iteration without a position to resume from."""
        worker, workers = 0, 1
        if info is None:
            epoch, resumes = self._epochs.take()
        else:
            worker, workers, base_seed = info.id, info.num_workers, info.seed - info.id
            ordinal = self._ordinals[base_seed] = self._ordinals.get(base_seed, -1) + 1
            epoch, resumes = self._epochs.take_with(base_seed, ordinal, worker, workers)
        replicas = self.store.world_size * workers
        position = self._begin_of(epoch, resumes).divided(replicas, self._slots, workers)
        return position, position.of_rank(self.store.rank)[worker]

    def _from_worker_state(self, position: Position, workers: int) -> tuple[Position, int]:
        """Of a worker that has its state from a StatefulDataLoader."""
        self._has_worker_state = False
        replicas, batch_size = self.store.world_size * workers, self.batch_size
        found = position.replicas, position.slots, position.batch_size
        if found != (replicas, self._slots, batch_size) or not position.taken:
            raise InvalidArgument(
                f"the StatefulDataLoader's state is of {position.replicas} replicas, {position.slots} "
                f"slots, batches of {position.batch_size}; now there are {replicas}, {self._slots} and "
                f"{batch_size}: give it to loader.load_state_dict before the DataLoader is made, not to it"
            )
        self._epochs.follow(position.of.epoch, workers)
        return position, next(iter(position.taken))

    def _begin_of(self, epoch: int, resumes: bool) -> Position:
        """Where an epoch begins: at the loaded position, if that is wanted and of this epoch."""
        if resumes and self._loaded is not None and self._loaded.of.epoch == epoch:
            return self._loaded
        return self._fresh(epoch)

    def _fresh(self, epoch: int) -> Position:
        store = self.store
        of = Epoch(store.identity, len(store), store.order, self.seed, epoch)
        return Position(of, self.batch_size, self.drop_last)

    @property
    def _slots(self) -> Slots:
        return self.store.slots

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration stands: after the last batch that was received. Numbers, text and lists only.

        Every process's state is enough for all of them where they have taken equally many batches; otherwise
        join them with merge_states. Raises InvalidArgument where a DataLoader's workers do the reading: only
        the DataLoader knows what it has received of them.
        """
        if get_worker_info() is None and self._epochs.workers:
            raise InvalidArgument(
                "this Loader is read by a DataLoader's workers, and cannot know what was received: use "
                "torchdata's StatefulDataLoader and its state_dict, or loader.state_after(batches, workers)"
            )
        if self._progress is not None:
            return self._progress.position().state()
        return self._begin_of(self._epochs.next, self._epochs.resumes).state()

    def state_after(self, batches: int, workers: int, epoch: int | None = None) -> dict[str, Any]:
        """The state_dict after so many batches were received from a DataLoader with so many workers.

        epoch  that they are of; unless given, the one that was iterated last
        """
        epoch, workers = max(0, self.epoch - 1) if epoch is None else epoch, max(1, workers)
        begin = self._begin_of(epoch, resumes=True)
        position = begin.divided(self.store.world_size * workers, self._slots, workers)
        return position.advanced(self.store.rank, batches).state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration go on where the state says.

        state_dict  from state_dict, state_after, merge_states, or a StatefulDataLoader around a Loader, saved
                    with any number of processes and workers. With the same numbers and cache_bytes the same
                    batches follow; with others each remaining sample comes once

        Raises InvalidArgument where it is of other data, another order or seed.
        """
        position = from_state(state_dict)
        mine = self._fresh(position.of.epoch).of
        if position.of != mine:
            raise InvalidArgument(_difference(position.of, mine))
        if get_worker_info() is not None:  # from a StatefulDataLoader: the state of this worker's own replica
            self._has_worker_state = True
        elif position.over:
            position = self._fresh(position.of.epoch + 1)
        else:
            position = position.with_batches(self.batch_size, self.drop_last)
        if not self._has_worker_state:
            self._epochs.set(position.of.epoch, resumes=True)
            self._epochs.clear_workers()
        self._progress, self._loaded = None, position


@dataclass(slots=True)
class _Progress:
    """What the consumer of one replica has received.

    begin     where its iteration began
    taken     samples of the shard; finished: there are no more
    """

    begin: Position
    replica: int
    taken: int
    finished: bool

    def position(self) -> Position:
        return self.begin.at(self.replica, self.taken, self.finished)


class _Iteration(Iterator[Any]):
    """One epoch of one replica."""

    def __init__(self, loader: Loader, begin: Position, replica: int, convert: Convert) -> None:
        taken = begin.taken_by([replica])[replica]
        self.progress = _Progress(begin, replica, taken, replica in begin.finished)
        self._store, self._convert, self._batch_size = loader.store, convert, loader.batch_size
        self._least = loader.batch_size if loader.drop_last else 1
        self._taken, self._end = self.progress.taken, begin.end(replica)  # taken of the store
        self._closed = self.progress.finished
        self._threads: DecodeThreads | None = None
        if self._closed:
            return
        self._store.sequence(
            seed=begin.of.seed,
            epoch=begin.of.epoch,
            after=begin.after,
            replica=replica,
            replicas=begin.replicas,
            skip=self._taken,
        )
        self._sequence = self._store.sequences
        if loader.num_threads:
            threads = loader.num_threads
            self._threads = DecodeThreads(convert, threads, loader.decoded_bytes, loader.decode_timeout_s)

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        try:
            if self._threads is not None:
                return self._from_threads(self._threads)
            batch = self._bread()
            if batch is None:
                raise StopIteration
            value = self._convert(batch)
            self.progress.taken = self._taken
            return value
        except BaseException as error:
            self.progress.finished = isinstance(error, StopIteration)
            self.close()
            raise

    def _from_threads(self, threads: DecodeThreads) -> Any:
        # A few at a time: the first batch is not to wait for all that may be ahead of it.
        for _ in range(max(2, threads.threads + 1 - len(threads))):
            if not threads.has_room() or (batch := self._bread()) is None:
                break
            threads.give(batch, self._taken)
        if not len(threads):
            raise StopIteration
        value, self.progress.taken = threads.take()
        return value

    def _bread(self) -> Batch | None:
        """The next batch of the store; None at the end."""
        if self._taken + self._least > self._end:
            return None
        batch = bread_of(self._store, self._sequence, self._batch_size)
        while batch is not None and not len(batch):  # all its samples were damaged
            batch = bread_of(self._store, self._sequence, self._batch_size)
        self._taken = self._store.taken
        return batch

    def close(self) -> None:
        """End it, and the threads that work for it."""
        self._closed = True
        if self._threads is not None:
            self._threads.close()

    def __del__(self) -> None:
        if getattr(self, "_threads", None) is not None:
            self.close()


class SampleDataset(Dataset[Any]):  # type: ignore[misc]
    """A store as a map-style data set: for samplers of one's own, evaluation, and look-ups by index.

    store   as mounted
    decode  makes a Sample into anything; without it a sample is what the store's encoding says

    ``DataLoader(SampleDataset(store), batch_size=64, sampler=...)`` reads a batch's samples at once.
    """

    def __init__(self, store: Store, decode: Callable[[Sample], Any] | None = None) -> None:
        self.store, self.decode = store, decode

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        decode = self.decode or (lambda sample: sample.fields)
        return decoded(decode, self.store.read_many([int(index) for index in indices]))


def _pinning(convert: Convert) -> Convert:
    return lambda batch: pinned(convert(batch))


def _difference(saved: Epoch, mine: Epoch) -> str:
    if saved.identity != mine.identity:
        return (
            f"the state is of another store, of {saved.samples} samples and identity {saved.identity}; this "
            f"one has {mine.samples}, {mine.identity}. Mount the store that the state was saved with, its "
            "parts in the same order, with the same weights, filters and packing"
        )
    return (
        f"the state is of order {saved.order!r} and seed {saved.seed}, this Loader of {mine.order!r} and "
        f"{mine.seed}: use the same ones to go on, or set_epoch to begin an epoch"
    )
