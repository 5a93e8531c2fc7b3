"""Part three: the choice of the way to move each tensor, against each single way alone."""

from __future__ import annotations

import statistics
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from io_bench.measure import Tensors, rotated, settle, tensors_in_sample, timed
from io_bench.rows import Spilled
from penstock.options import IoOptions
from penstock.storage.choice import Choice
from penstock.storage.costs import Tables
from penstock.storage.rounds import text_columns
from penstock.storage.spill import SpillSpace, Transfer
from penstock.units import format_bytes, format_rate

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
IN_FLIGHT_BYTES = 64 * MIB  # what the runtime's mover allows
SETTLING_STEPS = 8  # untimed: files are written, and every way is tried for every size
FRACTION = 0.45  # of the activations' memory, as in the demo

# By name, the domains whose ways it chooses among.
CHOICES = {"adaptive": ("disk", "page cache"), "adaptive, disk": ("disk",)}


@dataclass(frozen=True)
class Step:
    """What a training step moves to spill space and back.

    sizes_bytes   in the order in which tensors leave
    reads         their indices, in the order in which they come back
    """

    sizes_bytes: tuple[int, ...]
    reads: tuple[int, ...]


def demo_step() -> Step:
    """What leaves memory in a step of examples/demo.py, planned for a machine that is written down.

    So the step is the same wherever the benchmark runs; no tensor is allocated to find it.
    """
    sys.path.insert(0, str(ROOT / "examples"))
    import gpt
    from methods import trace_of

    import penstock

    trace = trace_of(gpt.Config())
    hardware = penstock.Hardware(
        device_bytes=16 << 30,
        disk_bytes=64 << 30,
        disk_write_bytes_per_s=7e9,
        disk_read_bytes_per_s=4e9,
        disk_shares_bus=False,
        name="written down",
    )
    activations_bytes = trace.peak_bytes - trace.persistent_bytes
    budget_bytes = trace.persistent_bytes + int(FRACTION * activations_bytes)
    evictions = penstock.plan(trace, hardware, recompute=False, device_budget=budget_bytes).evictions
    order = sorted(range(len(evictions)), key=lambda index: evictions[index].prefetch_at)
    return Step(tuple(int(trace.tensor_bytes[eviction.tensor]) for eviction in evictions), tuple(order))


@dataclass
class Contender:
    """A spill space with some of the ways, and what it took.

    settling_s   writing and reading until everything was tried
    """

    name: str
    domain: str
    spilled: Spilled
    settling_s: float = 0.0
    write_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)

    def samples_s(self) -> list[float]:
        """Writing and reading back, in each round."""
        return [sum(both) for both in zip(self.write_s, self.read_s, strict=True)]

    def total_s(self) -> float:
        return statistics.median(self.samples_s())


def measure_sizes(
    directory: Path,
    sizes_bytes: Sequence[int],
    rounds_for: Callable[[int], int],
    seed: int,
    quick: bool,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Tensors of one size, one at a time, for each size; and what the choice says of all of them."""
    choices = Choices()
    measured = {}
    for size_bytes in sizes_bytes:
        count = tensors_in_sample(size_bytes, quick)
        tensors = Tensors([size_bytes] * count, seed)
        rounds = rounds_for(size_bytes)
        with contenders(directory, tensors, choices) as compared:
            for number in range(-1, rounds):
                tensors.refresh()
                for one in rotated(compared, number):
                    tell(f"{format_bytes(size_bytes)}: {one.name}, round {number + 1} of {rounds}")
                    one_by_one(one, number < 0)
                    tensors.verify(tensors.destinations, one.name)
                    settle(directory)
            measured[str(size_bytes)] = {"tensors": count, **compare(compared, tensors.total_bytes)}
    return {"sizes": measured, "choices": choices.documents()}


def one_by_one(one: Contender, settling: bool) -> None:
    """A sample of writing each tensor and then reading each; or, before the first, settling."""
    spilled = one.spilled
    indices = range(len(spilled.tensors.tensors))
    if settling:
        one.settling_s = timed(lambda: spilled.settle(one.name in CHOICES))[0].wall_s
        return
    spilled.release()
    spilled.tensors.scrub()

    def write() -> None:
        for index in indices:
            spilled.write([index])

    def read() -> None:
        for index in indices:
            spilled.read([index])

    one.write_s.append(timed(write)[0].wall_s)
    one.read_s.append(timed(read)[0].wall_s)


def measure_step(
    directory: Path, step: Step, rounds: int, seed: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The transfers of a training step, as many in flight as the runtime has."""
    choices = Choices()
    tensors = Tensors(step.sizes_bytes, seed)
    with contenders(directory, tensors, choices) as compared:
        for number in range(-SETTLING_STEPS, rounds):
            tensors.refresh()
            for one in rotated(compared, number):
                tell(f"step: {one.name}, round {number + 1} of {rounds}")
                written_s, read_s = run_step(one.spilled, step)
                tensors.verify(tensors.destinations, one.name)
                if number < 0:
                    one.settling_s += written_s + read_s
                else:
                    one.write_s.append(written_s)
                    one.read_s.append(read_s)
                settle(directory)
        result = compare(compared, tensors.total_bytes)
    return {
        "tensors": len(step.sizes_bytes),
        "sizes_bytes": step.sizes_bytes,
        "in_flight_bytes": IN_FLIGHT_BYTES,
        **result,
        "choices": choices.documents(),
    }


def run_step(spilled: Spilled, step: Step) -> tuple[float, float]:
    """Seconds in which every tensor left, and in which every one came back."""
    spilled.release()
    spilled.tensors.scrub()
    writing, _ = timed(lambda: keep_in_flight(spilled, range(len(step.sizes_bytes)), spilled.start_write))
    reading, _ = timed(lambda: keep_in_flight(spilled, step.reads, spilled.start_read))
    return writing.wall_s, reading.wall_s


def keep_in_flight(
    spilled: Spilled, indices: Iterable[int], start: Callable[[int, Callable[[Transfer], None]], None]
) -> None:
    """Start all, no more than `IN_FLIGHT_BYTES` at once; wait for all. Raises the first error."""
    changed = threading.Condition()
    flying_bytes = 0
    errors: list[Exception] = []

    def started(index: int) -> Callable[[Transfer], None]:
        size_bytes = spilled.tensors.sizes_bytes[index]

        def done(transfer: Transfer) -> None:
            nonlocal flying_bytes
            with changed:
                flying_bytes -= size_bytes
                if transfer.error is not None:
                    errors.append(transfer.error)
                changed.notify()

        return done

    for index in indices:
        size_bytes = spilled.tensors.sizes_bytes[index]
        with changed:
            while flying_bytes and flying_bytes + size_bytes > IN_FLIGHT_BYTES:
                changed.wait()
            flying_bytes += size_bytes
        start(index, started(index))
    with changed:
        while flying_bytes:
            changed.wait()
    if errors:
        raise errors[0]


def described(tables: Tables) -> str:
    """The rows as text; ``*`` marks what is used."""

    def rate(bytes_per_s: float | None, used: bool) -> str:
        return "-" if bytes_per_s is None else format_rate(bytes_per_s) + (" *" if used else "  ")

    lines = [
        (
            format_bytes(row.class_bytes),
            row.path,
            row.medium,
            rate(row.write_bytes_per_s, row.writes),
            rate(row.read_bytes_per_s, row.reads),
            f"{row.write_samples} + {row.read_samples}",
        )
        for row in tables.rows()
    ]
    return text_columns([("size from", "path", "medium", "write", "read", "samples"), *lines])


class Choices:
    """The choice of each adaptive contender: one for its spaces of all sizes, and so one report."""

    def __init__(self) -> None:
        self._made: dict[str, Choice] = {}

    def share(self, name: str, space: SpillSpace) -> None:
        """Let ``space`` use the choice of this name: its own, if it is the first."""
        space.choice = self._made.setdefault(name, space.choice)

    def documents(self) -> dict[str, Any]:
        return {
            name: {
                "costs": msgspec.to_builtins(choice.tables()),
                "costs_text": described(choice.tables()),
                "rounds": msgspec.to_builtins(choice.report()),
                "rounds_text": choice.report().describe(),
            }
            for name, choice in self._made.items()
        }


@contextmanager
def contenders(directory: Path, tensors: Tensors, choices: Choices) -> Iterator[list[Contender]]:
    """A spill space for each choice, and one for each single way."""
    room_bytes = sum(-(-size_bytes // 4096) * 4096 for size_bytes in tensors.sizes_bytes)
    if len(set(tensors.sizes_bytes)) > 1:
        room_bytes *= 2  # different sizes leave gaps
    with SpillSpace(
        directory, IoOptions(page_cache_budget=room_bytes), capacity_bytes=2 * room_bytes
    ) as space:
        ways = {path.name: path.medium for path in space.paths.values()}
    with ExitStack() as stack:
        compared = []
        for name, domains in [*CHOICES.items(), *((way, (domain,)) for way, domain in ways.items())]:
            cache_bytes = room_bytes if "page cache" in domains else 0
            space = stack.enter_context(
                SpillSpace(
                    directory,
                    IoOptions(page_cache_budget=cache_bytes, paths=None if name in CHOICES else [name]),
                    capacity_bytes=room_bytes + cache_bytes,
                )
            )
            if name in CHOICES:
                choices.share(name, space)
            compared.append(Contender(name, " or ".join(domains), Spilled(space, tensors)))
        yield compared


def compare(compared: Sequence[Contender], total_bytes: int) -> dict[str, Any]:
    """By contender: medians, samples, and the time relative to the best single way's."""
    single = [one for one in compared if one.name not in CHOICES]
    document: dict[str, Any] = {"bytes": total_bytes, "contenders": {}, "best_single": {}}
    for choice, domains in CHOICES.items():
        allowed = [one for one in single if one.domain in domains]
        if allowed:
            document["best_single"][choice] = min(allowed, key=Contender.total_s).name
    totals_s = {one.name: one.total_s() for one in compared}
    samples_s = {one.name: one.samples_s() for one in compared}
    for one in compared:
        best = document["best_single"].get(one.name)
        document["contenders"][one.name] = {
            "domain": one.domain,
            "median_s": totals_s[one.name],
            "median_write_s": statistics.median(one.write_s),
            "median_read_s": statistics.median(one.read_s),
            "settling_s": one.settling_s,
            "samples_write_s": one.write_s,
            "samples_read_s": one.read_s,
            **(against(samples_s[best], samples_s[one.name]) if best else {}),
        }
    return document


def against(best_s: Sequence[float], chosen_s: Sequence[float]) -> dict[str, Any]:
    """The choice's speed as a multiple of the best single way's: median and quartiles over the rounds.

    Each round is compared with itself: the machine's own speed differs more between rounds.
    """
    ratios = [best / chosen for best, chosen in zip(best_s, chosen_s, strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"speed_of_best_single": median, "speed_of_best_single_quartiles": [lower, upper]}
