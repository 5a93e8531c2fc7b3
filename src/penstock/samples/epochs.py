"""Epochs of a Loader: the position in one, as a value, and how the workers of a DataLoader agree on one.

A replica is what reads one share of an epoch: worker ``worker`` of process ``rank`` is number
``rank * workers + worker``. A state holds what its own replicas have taken. For the others it assumes that
worker w of every process has taken what worker w of this one has, which is so in data-parallel training;
merge_states joins states that differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from penstock.errors import InvalidArgument
from penstock.samples.order import Segment, Slots

VERSION = 2
MOST_REPLICAS = 1 << 20  # as in C++
_MOST_SEGMENTS = 1024

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]


class Epoch(msgspec.Struct, frozen=True, rename={"identity": "store"}):
    """What an epoch is an epoch of: all of it must be the same to go on.

    identity  of the store, and its number of samples
    """

    identity: str
    samples: _Count
    order: str
    seed: int
    epoch: _Count


class Position(msgspec.Struct, frozen=True):
    """An epoch, and what has been taken of it.

    after     the divisions that are over
    replicas  of the division in force; 0: nothing has been divided yet
    slots     chunks that each replica mixes; of a mixture, of each of its sources
    workers   replicas of one process
    taken     samples, by replica, of the replicas that are known
    finished  by replica, of those known: it has given all that it will
    """

    of: Epoch
    batch_size: _Positive
    drop_last: bool
    after: Annotated[tuple[Segment, ...], msgspec.Meta(max_length=_MOST_SEGMENTS)] = ()
    replicas: Annotated[int, msgspec.Meta(ge=0, le=MOST_REPLICAS)] = 0
    slots: Slots = 0
    workers: Annotated[int, msgspec.Meta(ge=1, le=MOST_REPLICAS)] = 1
    taken: dict[_Count, _Count] = {}
    finished: frozenset[int] = frozenset()

    @property
    def over(self) -> bool:
        """Whether every known replica has finished."""
        return bool(self.taken) and self.finished >= self.taken.keys()

    @property
    def left(self) -> int:
        """Samples that the division in force divides."""
        return self.of.samples - sum(sum(segment.taken) for segment in self.after)

    def size(self, replica: int) -> int:
        """Samples of a replica: they differ by one at most."""
        return self.left // self.replicas + (replica < self.left % self.replicas)

    def end(self, replica: int) -> int:
        """How many samples of the replica are given: with drop_last whole batches, equally many of each."""
        if not self.drop_last:
            return self.size(replica)
        return self.left // self.replicas // self.batch_size * self.batch_size

    def taken_by(self, replicas: Iterable[int]) -> dict[int, int]:
        """Samples that each of the replicas has taken, known or assumed.

        Raises InvalidArgument where the state does not say.
        """
        batches = self._batches_of(self.taken)
        finished = {replica % self.workers for replica in self.finished}

        def assumed(replica: int) -> int:
            worker = replica % self.workers
            if worker not in batches:
                raise InvalidArgument(
                    f"the state knows {len(self.taken)} of {self.replicas} replicas, and of worker "
                    f"{worker} nothing: give loader.load_state_dict the whole state of the DataLoader, or "
                    "penstock.samples.merge_states of all processes' states"
                )
            if worker in finished:
                return self.end(replica)
            if len(batches[worker]) > 1:
                raise InvalidArgument(
                    f"the state knows {len(self.taken)} of {self.replicas} replicas, which have given "
                    f"different numbers of batches ({min(batches[worker])} to {max(batches[worker])}): give "
                    "penstock.samples.merge_states the states of all processes"
                )
            return min(next(iter(batches[worker])) * self.batch_size, self.size(replica))

        return {each: self.taken[each] if each in self.taken else assumed(each) for each in replicas}

    def divided(self, replicas: int, slots: Slots, workers: int) -> Position:
        """The same epoch in so many replicas: as it was divided, or what is left of it divided anew."""
        same = self
        if replicas == self.replicas and workers != self.workers:
            same = replace(self, workers=workers, taken=self.taken_by(range(replicas)))
        if (replicas, slots) == (same.replicas, same.slots) and same._even():
            return same
        taken = dict.fromkeys(range(replicas), 0)
        closed = self._closed()
        return replace(closed, replicas=replicas, slots=slots, workers=workers, taken=taken)

    def _even(self) -> bool:
        """Whether the processes have given equally many batches, so that each can speak for the others."""
        return all(len(each) == 1 for each in self._batches_of(self.taken.keys() - self.finished).values())

    def _batches_of(self, replicas: Iterable[int]) -> dict[int, set[int]]:
        """How many batches these replicas have given, by worker."""
        batches: dict[int, set[int]] = {}
        for replica in replicas:
            batches.setdefault(replica % self.workers, set()).add(-(-self.taken[replica] // self.batch_size))
        return batches

    def _closed(self) -> Position:
        """The same, with the division in force over."""
        counts = tuple(self.taken_by(range(self.replicas)).values())
        after = (*self.after, Segment(self.replicas, self.slots, counts)) if any(counts) else self.after
        return replace(self, after=after, replicas=0, taken={}, finished=frozenset())

    def with_batches(self, batch_size: int, drop_last: bool) -> Position:
        """The same in batches of another size, for which what is left has to be divided anew."""
        same = self if batch_size == self.batch_size else self._closed()
        return replace(same, batch_size=batch_size, drop_last=drop_last)

    def at(self, replica: int, taken: int, finished: bool) -> Position:
        """The position of a process that knows one replica."""
        done = frozenset([replica]) if finished else frozenset()
        return replace(self, taken={replica: taken}, finished=done)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The replicas of a process in the order in which its batches come: the one that is due first."""
        own = range(rank * self.workers, (rank + 1) * self.workers)
        taken = self.taken_by(own)
        open_ = [replica for replica in own if taken[replica] < self.end(replica)]
        due = min(open_, key=lambda replica: taken[replica] // self.batch_size, default=own[0])
        return (*own[due - own[0] :], *own[: due - own[0]])

    def advanced(self, rank: int, batches: int) -> Position:
        """The position after so many more batches of this process, taken from its workers in turn."""
        turns = self.of_rank(rank)
        taken = self.taken_by(turns)
        while batches > 0:
            open_ = [replica for replica in turns if taken[replica] < self.end(replica)]
            if not open_:
                break
            rounds = max(1, min(batches // len(open_), *(self._whole(s, taken[s]) for s in open_)))
            for replica in open_[:batches]:
                taken[replica] = min(taken[replica] + rounds * self.batch_size, self.end(replica))
            batches -= rounds * len(open_[:batches])
        finished = frozenset(each for each in turns if batches > 0 and taken[each] >= self.end(each))
        return replace(self, taken=taken, finished=finished)

    def _whole(self, replica: int, taken: int) -> int:
        """Batches that the replica can give before its last one."""
        return (self.end(replica) - taken - 1) // self.batch_size

    def _unread(self) -> Position:
        """What must be the same in states that belong together."""
        return replace(self, taken={}, finished=frozenset())

    def state(self) -> dict[str, Any]:
        """For state_dict: numbers, text and lists only."""
        fields = msgspec.to_builtins(self)
        return {
            "version": VERSION,
            **fields.pop("of"),
            **fields,
            "after": [[count, msgspec.to_builtins(slots), list(taken)] for count, slots, taken in self.after],
            "taken": [[replica, taken] for replica, taken in sorted(self.taken.items())],
            "finished": sorted(self.finished),
        }

    def is_possible(self) -> bool:
        """Whether its numbers, which anybody may have written, agree with each other."""
        sound = self.left >= 0 and self.replicas % self.workers == 0 and self.finished <= self.taken.keys()
        sound = sound and _are_possible(self.slots)
        for replicas, slots, taken in self.after:
            sound = sound and 1 <= replicas == len(taken) <= MOST_REPLICAS
            sound = sound and _are_possible(slots) and min(taken) >= 0
        return sound and all(
            replica < self.replicas and taken <= self.size(replica) for replica, taken in self.taken.items()
        )


def _are_possible(slots: Slots) -> bool:
    return all(0 <= each < 1 << 32 for each in (slots if isinstance(slots, tuple) else (slots,)))


def from_state(state: Mapping[str, Any]) -> Position:
    """The position that a state says: a Loader's, or that of a StatefulDataLoader around one.

    Raises InvalidArgument where it is neither.
    """
    try:
        if "_snapshot" in state:
            return _from_workers(state)
        return _from_state_of_loader(state.get("dataset_state", state))
    except InvalidArgument:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(f"{_NO_STATE} ({error!r}): {_REMEDY}") from None


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state from those of several processes (or workers) that stopped in the same epoch.

    Needed only where they had not taken equally many batches. Each is what Loader.state_dict or a
    StatefulDataLoader's state_dict gave. Raises InvalidArgument where they do not belong together.
    """
    return _joined([from_state(state) for state in states]).state()


def _joined(positions: Sequence[Position]) -> Position:
    if not positions:
        raise InvalidArgument("there is no state to merge: give the states of all processes")
    divided = [position for position in positions if position.replicas]
    if divided and len(divided) < len(positions):
        raise InvalidArgument(
            "some states are of an epoch that has not begun, others are further: merge states of one moment"
        )
    first = (divided or positions)[0]
    taken: dict[int, int] = {}
    for position in positions:
        if position._unread() != first._unread():
            raise InvalidArgument(
                f"the states do not belong together: epoch {position.of.epoch} of seed {position.of.seed} in "
                f"{position.replicas} replicas, and epoch {first.of.epoch} of seed {first.of.seed} in "
                f"{first.replicas}. Merge states of one run that were saved at one time"
            )
        if any(taken.get(replica, count) != count for replica, count in position.taken.items()):
            raise InvalidArgument(
                "two states say different things of one replica: merge one state of each process"
            )
        taken.update(position.taken)
    finished = frozenset().union(*(position.finished for position in positions))
    return replace(first, taken=taken, finished=finished)


def _from_workers(state: Mapping[str, Any]) -> Position:
    """From the state of a StatefulDataLoader with workers: a snapshot, and how many batches followed it."""
    snapshots = state["_snapshot"]["_worker_snapshots"].values()
    states = [snapshot["dataset_state"] for snapshot in snapshots]
    if any(not isinstance(each, Mapping) for each in states):
        raise InvalidArgument("the state of the DataLoader holds none of a Loader: it was not around one")
    position = _joined([_from_state_of_loader(each) for each in states])
    if state.get("_iterator_finished"):
        return replace(position, finished=frozenset(position.taken))
    rank = min(position.taken, default=0) // position.workers
    since = int(state.get("_steps_since_snapshot", 0))
    return position.advanced(rank, since) if since else position


def _from_state_of_loader(state: Any) -> Position:
    if state["version"] != VERSION:
        raise InvalidArgument(
            f"the Loader's state is of version {state['version']}, and this penstock reads version "
            f"{VERSION}: use the version of penstock that saved it"
        )
    of = msgspec.convert(state, Epoch)
    position = msgspec.convert({**state, "of": of, "taken": dict(state["taken"])}, Position)
    if not position.is_possible():
        raise InvalidArgument(f"{_NO_STATE} (it contradicts itself): {_REMEDY}")
    return position


_NO_STATE = "this is not a state of a penstock Loader"
_REMEDY = "give what Loader.state_dict returned, or the state_dict of a StatefulDataLoader around a Loader"

if TYPE_CHECKING:
    import torch

_ROWS = 16  # iterations that are remembered
_WORKERS = 256  # of which it is remembered what they have begun
_ROW = np.dtype(
    [
        ("known", "<i8"),  # 1: it holds an iteration
        ("base_seed", "<i8"),
        ("ordinal", "<i8"),  # which iteration of the same base seed
        ("epoch", "<i8"),
        ("resumes", "<i8"),
        ("begun", "<i8", _WORKERS),  # one more than the epoch that each has begun
    ]
)
_SHARED = np.dtype([("next", "<i8"), ("resumes", "<i8"), ("workers", "<i8"), ("rows", _ROW, _ROWS)])


class EpochCoordinator:
    """The next epoch of a Loader and of its copies in worker processes.

    A DataLoader copies its data set into every worker, but does not pass it the epoch. So the Loader shares
    its next epoch with its copies in memory: the first worker to begin writes the epoch there, and the others
    of the same iteration of the DataLoader, which they know by its base seed, find it. No lock is taken,
    which a killed worker could keep.

    Pickled by a process that starts a worker, the memory is shared; otherwise it is copied.
    """

    def __init__(self) -> None:
        import torch  # states are merged without it

        self._attach(torch.zeros(_SHARED.itemsize, dtype=torch.uint8))

    def _attach(self, memory: torch.Tensor) -> None:
        self._memory = memory.share_memory_()
        self._shared: Any = self._memory.numpy().view(_SHARED)[0]

    __setstate__ = _attach

    def __getstate__(self) -> torch.Tensor:
        return self._memory

    @property
    def next(self) -> int:
        """The epoch that the next iteration will be of."""
        return int(self._shared["next"])

    @property
    def resumes(self) -> bool:
        """Whether the next iteration goes on from the loaded position."""
        return bool(self._shared["resumes"])

    @property
    def workers(self) -> int:
        """Workers of the iteration that began last; 0: it was in the process itself."""
        return int(self._shared["workers"])

    def set(self, epoch: int, resumes: bool) -> None:
        """What the next iteration is of, whatever was agreed before."""
        self._shared["rows"]["known"] = 0
        self._shared["rows"]["begun"] = 0
        self._shared["resumes"] = resumes
        self._shared["next"] = epoch

    def clear_workers(self) -> None:
        """No iteration of a DataLoader counts any more: a state was loaded."""
        self._shared["workers"] = 0

    def follow(self, epoch: int, workers: int) -> None:
        """A worker has begun an iteration of this epoch."""
        self._shared["workers"] = workers
        self._shared["resumes"] = 0
        self._shared["next"] = epoch + 1

    def take(self) -> tuple[int, bool]:
        """For an iteration in the process itself: its epoch, and whether it goes on where one was loaded."""
        epoch, resumes = self.next, self.resumes
        self.follow(epoch, 0)
        return epoch, resumes

    def take_with(self, base_seed: int, ordinal: int, worker: int, workers: int) -> tuple[int, bool]:
        """The same for worker ``worker`` of the ``ordinal``-th iteration of a DataLoader with this base seed.

        Workers that begin at once write the same row: what it is made from is read before it is looked for,
        and changes after it was written. A worker that finds a row that it has begun already knows that a
        new iteration has the seed of an old one.
        """
        epoch, resumes = self.next, self.resumes
        row: Any = self._shared["rows"][hash((base_seed, ordinal)) % _ROWS]
        mine = worker % _WORKERS
        known = row["known"] and (row["base_seed"], row["ordinal"]) == (base_seed, ordinal)
        if known and row["begun"][mine] != row["epoch"] + 1:
            epoch, resumes = int(row["epoch"]), bool(row["resumes"])
            row["begun"][mine] = epoch + 1
            return epoch, resumes
        row["base_seed"], row["ordinal"], row["resumes"], row["epoch"] = base_seed, ordinal, resumes, epoch
        row["begun"][mine] = epoch + 1
        row["known"] = 1
        self.follow(max(epoch, self.next - 1), workers)
        return epoch, resumes
