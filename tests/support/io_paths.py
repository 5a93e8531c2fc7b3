"""Simulated machines: what each path to move a tensor costs, with noise, known to the test."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from penstock.storage.choice import Choice
from penstock.storage.costs import Kind

PATHS = {
    "io_uring direct": "disk",
    "io_uring staged": "disk",
    "posix direct": "disk",
    "posix buffered": "page cache",
    "posix mapped": "page cache",
}
Costs = Mapping[Kind, Mapping[str, float]]  # seconds per GB
Cost = Callable[[Kind, str, int], float]  # seconds, without noise


class Moved(NamedTuple):
    kind: Kind
    size_bytes: int
    path: str
    cost_s: float


class Machine:
    """Costs as given, times noise.

    sigma      of the noise's logarithm
    outliers   fraction of transfers that take ten times as long
    """

    def __init__(
        self, cost: Cost | Costs, *, sigma: float = 0.1, outliers: float = 0.03, seed: int = 0
    ) -> None:
        self.cost = cost if callable(cost) else by_table(cost)
        self._sigma, self._outliers = sigma, outliers
        self._random = random.Random(seed)

    def move(self, kind: Kind, size_bytes: int, path: str) -> Moved:
        noise = math.exp(self._random.gauss(0, self._sigma))
        if self._random.random() < self._outliers:
            noise *= 10
        return Moved(kind, size_bytes, path, self.cost(kind, path, size_bytes) * noise)


def by_table(costs: Costs) -> Cost:
    return lambda kind, path, size_bytes: costs[kind][path] * size_bytes * 1e-9


def train(
    choice: Choice, machine: Machine, sizes: Sequence[int], steps: int, *, in_flight: int = 3
) -> list[list[Moved]]:
    """Steps that write tensors of ``sizes`` and read them back in reverse: what was moved in each."""
    return [_step(choice, machine, sizes, in_flight) for _ in range(steps)]


def _step(choice: Choice, machine: Machine, sizes: Sequence[int], in_flight: int) -> list[Moved]:
    moved: list[Moved] = []
    seen = 0

    def begin(kind: Kind, size_bytes: int, path: str) -> None:
        nonlocal seen
        moved.append(machine.move(kind, size_bytes, path))
        while len(moved) - seen > in_flight:
            seen = end(seen)

    def end(index: int) -> int:
        done = moved[index]
        choice.observe(done.kind, done.size_bytes, done.path, done.cost_s)
        return index + 1

    written = []
    for size_bytes in sizes:
        path = choice.path_to_write(size_bytes)
        written.append((size_bytes, choice.paths[path]))
        begin("write", size_bytes, path)
    for size_bytes, medium in reversed(written):
        path = choice.path_to_read(size_bytes, medium)
        assert choice.paths[path] == medium
        begin("read", size_bytes, path)
    while seen < len(moved):
        seen = end(seen)
    return moved


def time_s(steps: Sequence[Sequence[Moved]], cost: Cost, write: str = "", read: str = "") -> float:
    """Seconds the transfers cost without their noise; or would have cost by other paths."""
    moves = Counter((moved.kind, moved.size_bytes, moved.path) for step in steps for moved in step)
    instead = {"write": write, "read": read or write}
    return sum(
        count * cost(kind, instead[kind] or path, size_bytes)
        for (kind, size_bytes, path), count in moves.items()
    )


def optimum_s(steps: Sequence[Sequence[Moved]], cost: Cost, paths: Mapping[str, str] = PATHS) -> float:
    """Seconds by the best pair of paths of one medium for each size."""
    sizes = {moved.size_bytes for step in steps for moved in step}
    same = [[[moved for step in steps for moved in step if moved.size_bytes == size]] for size in sizes]
    return sum(
        min(
            time_s(moves, cost, write, read)
            for write in paths
            for read in paths
            if paths[write] == paths[read]
        )
        for moves in same
    )
