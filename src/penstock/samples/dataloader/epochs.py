"""Epoch coordination: the workers of a DataLoader agree on the epoch of an iteration through shared memory.

A DataLoader copies its data set into every worker, and tells it nothing of epochs. So the Loader keeps its
next epoch in memory that it shares with its copies: the first worker to begin notes the epoch there, and the
others of the same iteration of the DataLoader, which they know by its base seed, find it. No lock is taken,
which a killed worker could keep.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
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
_HEAD = np.dtype([("next", "<i8"), ("resumes", "<i8"), ("workers", "<i8")])


class EpochStart(NamedTuple):
    """Where an iteration begins.

    epoch     the epoch to iterate
    resumes   begin at the position that was loaded, if it is a position of this epoch
    """

    epoch: int
    resumes: bool


class EpochCoordinator:
    """The next epoch of a Loader and of its copies in worker processes.

    Pickled by a process that starts a worker, the memory is shared; otherwise it is copied.
    """

    def __init__(self) -> None:
        self._attach(torch.zeros(_HEAD.itemsize + _ROWS * _ROW.itemsize, dtype=torch.uint8))

    def _attach(self, memory: torch.Tensor) -> None:
        self._memory = memory.share_memory_()
        data = self._memory.numpy()
        self._head = data[: _HEAD.itemsize].view(_HEAD)[0:1]
        self._rows = data[_HEAD.itemsize :].view(_ROW)

    def __getstate__(self) -> torch.Tensor:
        return self._memory

    def __setstate__(self, memory: torch.Tensor) -> None:
        self._attach(memory)

    @property
    def next(self) -> int:
        """The epoch that the next iteration will be of."""
        return int(self._head["next"][0])

    @property
    def resumes(self) -> bool:
        """Whether the next iteration goes on from the loaded position."""
        return bool(self._head["resumes"][0])

    @property
    def workers(self) -> int:
        """Workers of the iteration that began last; 0: it was in the process itself."""
        return int(self._head["workers"][0])

    def set(self, epoch: int, resumes: bool) -> None:
        """What the next iteration is of, whatever was agreed before."""
        self._rows["known"] = 0
        self._rows["begun"] = 0
        self._head["resumes"] = resumes
        self._head["next"] = epoch

    def forget_workers(self) -> None:
        """No iteration of a DataLoader counts any more: a state was loaded."""
        self._head["workers"] = 0

    def follow(self, epoch: int, workers: int) -> None:
        """An iteration of this epoch has begun, by what a worker was told."""
        self._head["workers"] = workers
        self._head["resumes"] = 0
        self._head["next"] = epoch + 1

    def take(self) -> EpochStart:
        """For an iteration in the process itself."""
        start = EpochStart(self.next, self.resumes)
        self.follow(start.epoch, 0)
        return start

    def take_with(self, base_seed: int, ordinal: int, worker: int, workers: int) -> EpochStart:
        """For worker ``worker`` of the ``ordinal``-th iteration of a DataLoader with this base seed.

        Workers that begin at once write the same row: what it is made from is read before it is looked for,
        and changes after it was written. A worker that finds a row that it has begun already knows that a
        new iteration has the seed of an old one.
        """
        fresh = EpochStart(self.next, self.resumes)
        row: Any = self._rows[hash((base_seed, ordinal)) % _ROWS]
        mine = worker % _WORKERS
        known = row["known"] and (row["base_seed"], row["ordinal"]) == (base_seed, ordinal)
        if known and row["begun"][mine] != row["epoch"] + 1:
            start = EpochStart(int(row["epoch"]), bool(row["resumes"]))
            row["begun"][mine] = start.epoch + 1
            return start
        row["base_seed"], row["ordinal"], row["resumes"], row["epoch"] = base_seed, ordinal, *fresh[::-1]
        row["begun"][mine] = fresh.epoch + 1
        row["known"] = 1
        self.follow(max(fresh.epoch, self.next - 1), workers)
        return fresh
