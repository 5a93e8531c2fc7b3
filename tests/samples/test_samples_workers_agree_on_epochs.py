"""Workers that begin at once, late, or twice agree on the epoch, without a lock."""

from __future__ import annotations

import ast
import multiprocessing
import os
import random
import time
from pathlib import Path

from penstock.samples.epochs import EpochCoordinator


def in_processes(
    count: int, epochs: EpochCoordinator, rounds: int, folder: Path
) -> list[list[tuple[int, bool]]]:
    """What each of so many forks was told in each round; a round has a base seed of its own."""
    barrier = multiprocessing.get_context("fork").Barrier(count, timeout=60)
    children = []
    for worker in range(count):
        if child := os.fork():
            children.append(child)
            continue
        told, pauses = [], random.Random(worker)
        for number in range(rounds):
            barrier.wait()
            if pauses.random() < 0.3:
                time.sleep(pauses.random() * 0.001)
            told.append(epochs.take_with(base_seed=number + 7, ordinal=0, worker=worker, workers=count))
        (folder / str(worker)).write_text(repr([tuple(start) for start in told]))
        os._exit(0)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    return [ast.literal_eval((folder / str(worker)).read_text()) for worker in range(count)]


def test_workers_that_begin_at_once_are_told_the_same(tmp_path: Path) -> None:
    epochs = EpochCoordinator()
    epochs.set(3, resumes=True)
    told = in_processes(4, epochs, 300, tmp_path)
    assert all(each == told[0] for each in told)
    assert told[0] == [(3 + number, number == 0) for number in range(300)]
    assert epochs.next == 303 and not epochs.resumes and epochs.workers == 4


def test_a_worker_that_is_late_is_told_what_its_iteration_was(tmp_path: Path) -> None:
    epochs = EpochCoordinator()
    assert epochs.take_with(11, 0, 0, 2) == (0, False)
    assert epochs.take_with(12, 0, 0, 2) == (1, False)  # the next iteration, begun meanwhile
    assert epochs.take_with(11, 0, 1, 2) == (0, False)
    assert epochs.take_with(12, 0, 1, 2) == (1, False)


def test_the_same_seed_again_is_another_iteration() -> None:
    epochs = EpochCoordinator()
    for epoch in range(20):
        for worker in (1, 0):
            assert epochs.take_with(5, 0, worker, 2) == (epoch, False)


def test_a_loaded_epoch_is_resumed_once() -> None:
    epochs = EpochCoordinator()
    epochs.set(4, resumes=True)
    assert [epochs.take(), epochs.take()] == [(4, True), (5, False)]
    epochs.set(4, resumes=True)
    assert [epochs.take_with(9, 0, worker, 2) for worker in (0, 1)] == [(4, True)] * 2
    assert epochs.take_with(9, 1, 0, 2) == (5, False)
