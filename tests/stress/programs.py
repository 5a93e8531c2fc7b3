"""Ten small programs that do at once what must not disturb each other.

Each is a function of a seed's random numbers and an empty directory. It raises where a bit differs from the
plain run's. Budgets are the smallest that the program can run in, and more for what other threads hold.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import penstock
from penstock.errors import BudgetTooSmall
from penstock.runtime import arena, step_planner
from tests.runtime.test_random_programs_keep_every_bit import random_schedule
from tests.stress import delays
from tests.support import runs
from tests.support.runs import EVERYTHING, HARDWARE, Bits, Step, bits, in_memory, offloaded, state_bits

Draw = random.Random
happened: Counter[str] = Counter()  # copies of the last steps, by link; and in how many runs the rest did
LIMIT_S = 60.0  # of what should take a moment

# -- what they share ---------------------------------------------------------------------------------


@contextlib.contextmanager
def inside(draw: Draw, place: Path, budget_bytes: int, **options: Any) -> Iterator[penstock.Offload]:
    """A run with drawn options, of which no extents are left. Its schedules, too, are drawn half of the time:
    a plan is advice, and any actions at any kernel give the same bits."""
    chosen: dict[str, Any] = {
        "policy": draw.choice(["evict_all", "evict_all", "g10", "optimal"]),
        "paths": draw.choice(["io_uring direct", "io_uring staged", "posix direct", "posix staged"]),
        "verify": draw.random() < 0.3,
        "reexplore": 0,
    }
    rng, before = Draw(draw.random()), arena.stats()
    scheduled = step_planner.scheduled
    if draw.random() < 0.5:

        def scheduled(trace: Any, plan: Any, host_bytes: int) -> Any:
            return random_schedule(trace, rng)

    with (
        mock.patch.object(step_planner, "scheduled", scheduled),
        mock.patch.object(step_planner, "PLANNING_LIMITS_S", (0.01, 0.05)),
        runs.offload(
            device_budget=budget_bytes,
            spill_dir=place,
            **{"hardware": HARDWARE, "smallest_bytes": EVERYTHING} | chosen | options,
        ) as run,
    ):
        yield run
        _require_no_extents(run)
        happened.update(Counter(copy.link for copy in run._engine.moved))
        happened["recomputed"] += run._clock.recomputation.recomputed_bytes > 0
        now = arena.stats()
        for what in ("faults", "swapped_out_bytes", "swapped_in_bytes"):
            happened[what] += getattr(now, what) > getattr(before, what)


def _require_no_extents(run: penstock.Offload) -> None:
    """The space of tensors that are gone is free again."""
    run._engine.drain()
    with run._engine.lock:
        run._clock.storages.remove_dead()
        slots = [managed.slot for managed in run._clock.storages.all() if managed.slot is not None]
        lost_bytes = run._spill.used_bytes - sum(slot.extent.size_bytes for slot in slots)
        assert lost_bytes == 0, f"{lost_bytes} bytes of spill space are nobody's"


def require_same(found: Bits, wanted: Bits, text: str = "") -> None:
    assert len(found) == len(wanted), f"{len(found)} results, not {len(wanted)} {text}"
    different = [index for index, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]]
    assert not different, f"of {len(wanted)} results these have other bits: {different} {text}"


@contextlib.contextmanager
def beside(*works: Callable[[threading.Event], None]) -> Iterator[threading.Event]:
    """Work on threads of its own, until the event. Raises what it raises."""
    over, errors = threading.Event(), []

    def run(work: Callable[[threading.Event], None]) -> None:
        try:
            work(over)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), name=f"beside-{work.__name__}") for work in works]
    for thread in threads:
        thread.start()
    try:
        yield over
    finally:
        over.set()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in threads), "a thread does not end"
        if errors:
            raise errors[0]


def numpy_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor's own memory."""
    return tensor.detach().numpy()


def digest(view: np.ndarray[Any, Any]) -> int:
    """Read through its address, unannounced, and without the GIL."""
    return zlib.crc32(memoryview(view).cast("B"))


# -- training ----------------------------------------------------------------------------------------


def _mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(96, 96), nn.ReLU())))


def _train(
    step: Step,
    steps: int = 4,
    in_step: Callable[[int, nn.Module], Any] = lambda number, model: None,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    first: int = 0,
) -> Bits:
    """``in_step`` is called amid each step, and what it gives is part of the result. Batches are numbered
    from ``first`` on."""
    model = wrap(_mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: Bits = []
    for number in range(steps):
        with step():
            x = torch.randn(48, 96, generator=torch.Generator().manual_seed(first + number))
            loss = model(x).square().mean()
            found.append(repr(in_step(number, model)).encode())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += bits([loss])
    return found + bits(model.parameters()) + state_bits(optimizer)


@functools.cache
def _wanted(program: Callable[[Step], Bits]) -> tuple[Bits, int]:
    """The plain run's bits, and the smallest budget."""
    with tempfile.TemporaryDirectory() as place:
        _, report = offloaded(program, "1GiB", place, policy="evict_all", paths="posix staged")
    return in_memory(program), report.minimum_bytes


def minimum(draw: Draw, place: Path) -> None:
    """A multilayer perceptron with AdamW, in the smallest budget; compressed and recomputed."""
    wanted, least_bytes = _wanted(_train)
    torch.manual_seed(7)
    with inside(draw, place, least_bytes) as run:
        found = _train(run.step)
    require_same(found, wanted)


def unplanned(draw: Draw, place: Path) -> None:
    """The same outside of steps: the arena alone decides. Another thread makes and frees large tensors."""
    _, least_bytes = _wanted(_train)
    largest = 1 << 16
    torch.manual_seed(7)
    with inside(draw, place, least_bytes + 8 * largest) as run:

        def allocate(over: threading.Event) -> None:
            held: list[torch.Tensor] = []
            own = Draw(draw.random())
            while not over.is_set():
                value = own.randrange(1000)
                held.append(torch.full((own.randrange(1 << 10, largest // 4),), float(value)))
                if len(held) > own.randrange(10):
                    gone = held.pop(own.randrange(len(held)))
                    assert bool((numpy_of(gone) == gone[0].item()).all()), (
                        "another thread's tensor has changed"
                    )

        with beside(allocate):
            found = _train(contextlib.nullcontext, steps=2)
    del run
    require_same(found, _plain_of_two_steps())


@functools.cache
def _plain_of_two_steps() -> Bits:
    return in_memory(lambda step: _train(step, steps=2))


# -- readers -----------------------------------------------------------------------------------------


def _convolve(step: Step, watch: Callable[[torch.Tensor], None] = lambda tensor: None) -> Bits:
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16 * 16, 10),
    )  # fmt: skip
    for layer in model:
        if isinstance(layer, nn.ReLU):
            layer.register_forward_hook(lambda module, args, result: watch(result))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found: Bits = []
    for number in range(4):
        with step():
            x = torch.randn(4, 2, 16, 16, generator=torch.Generator().manual_seed(number))
            loss = F.cross_entropy(model(x), torch.arange(4))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += bits([loss])
    return found + bits(model.parameters()) + state_bits(optimizer)


def reader(draw: Draw, place: Path) -> None:
    """A network of convolutions and ReLU, whose results leave as bit masks. A thread reads them, and frozen
    weights, through NumPy while they move."""
    wanted, least_bytes = _wanted(_convolve)
    torch.manual_seed(7)
    watched: list[tuple[np.ndarray[Any, Any], int]] = []

    def watch(result: torch.Tensor) -> None:
        view = numpy_of(result)
        watched.append((view, digest(view)))
        if len(watched) > 6:
            del watched[draw.randrange(len(watched))]

    def read(over: threading.Event) -> None:
        own = Draw(draw.random())
        while not over.is_set():
            if watched:
                view, known = own.choice(watched)
                assert digest(view) == known, "a reader saw other bytes"
                del view
            over.wait(own.random() * 1e-3)

    with inside(draw, place, least_bytes + (1 << 17)) as run:
        frozen = torch.arange(8192, dtype=torch.float32)
        watched.append((numpy_of(frozen), digest(numpy_of(frozen))))
        del frozen
        with beside(read):
            found = _convolve(run.step, watch)
        watched.clear()
    require_same(found, wanted)


def _chain(step: Step, meanwhile: Callable[[list[torch.Tensor], int], Callable[[], None]]) -> Bits:
    """Results of kernels that are read and written behind torch's back before they are used again."""
    found: Bits = []
    source = torch.randn(1 << 14, generator=torch.Generator().manual_seed(1))
    for number in range(4):
        with step():
            links = [source + number]
            for _ in range(6):
                links.append(torch.tanh(links[-1] * 1.5))
            join = meanwhile(links, number)
            others = [torch.sin(source * factor) for factor in range(1, 9)]
            total = sum(others[1:], others[0])
            join()
            for link in links:
                total = total + link
            found += bits([total, *links])
            del links, others, total
    return found


def recomputed(draw: Draw, place: Path) -> None:
    """Another thread reads and writes, through NumPy, tensors that are dropped and recomputed."""

    def plainly(links: list[torch.Tensor], number: int) -> Callable[[], None]:
        numpy_of(links[number % 7])[::2] *= 2
        return lambda: None

    def plain(step: Step) -> Bits:
        return _chain(step, plainly)

    wanted, least_bytes = _wanted_chain(plain)
    problems: list[str] = []

    def on_a_thread(links: list[torch.Tensor], number: int) -> Callable[[], None]:
        views = [numpy_of(link) for link in links]
        pauses = [draw.random() * 2e-3 for _ in views]
        victim = number % 7
        digests = [digest(view) for view in views] if draw.random() < 0.3 else None

        def work() -> None:
            for index, (view, pause) in enumerate(zip(views, pauses, strict=True)):
                over.wait(pause)
                if index == victim:
                    view[::2] *= 2
                elif digests is not None and digest(view) != digests[index]:
                    problems.append("other bytes")

        thread = threading.Thread(target=work)
        over = threading.Event()
        thread.start()

        def join() -> None:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "an access has no end"

        return join

    with inside(draw, place, least_bytes + (1 << 17), policy=draw.choice(["evict_all", "optimal"])) as run:
        found = _chain(run.step, on_a_thread)
    require_same(found, wanted)
    assert not problems, problems


_chain_wanted: list[tuple[Bits, int]] = []


def _wanted_chain(plain: Callable[[Step], Bits]) -> tuple[Bits, int]:
    if not _chain_wanted:
        _chain_wanted.append(_wanted(plain))
    return _chain_wanted[0]


# -- memory that is given away -----------------------------------------------------------------------

ELEMENTS = 1 << 15


def _share_and_replace(draw: Draw, place: Path, here: bool) -> None:
    """Tensors are read, replaced and shared in drawn order; each must hold what was put there."""
    with inside(draw, place, 12 * ELEMENTS * 4) as run:
        values = [float(index) for index in range(24)]
        tensors = [torch.full((ELEMENTS,), value) for value in values]
        shared: list[int] = []
        waiting: list[int] = []

        def feed(over: threading.Event) -> None:
            while not over.is_set() or waiting:
                if waiting:
                    number = waiting[0]
                    tensors[number].share_memory_()
                    shared.append(number)
                    del waiting[0]
                over.wait(1e-4)

        with beside(feed):
            for _ in range(4):
                with run.step():
                    for _ in range(16):
                        number = draw.randrange(24)
                        found = float(tensors[number][::257].sum())
                        wanted = values[number] * len(range(0, ELEMENTS, 257))
                        assert found == wanted, f"tensor {number} holds {found}, not {wanted}"
                        del found
                        number = draw.randrange(24)
                        values[number] = float(draw.randrange(1000))
                        tensors[number] = torch.full((ELEMENTS,), values[number])
                        if len(shared) + len(waiting) < 4 and draw.random() < 0.3:
                            number = draw.randrange(24)
                            if here:
                                tensors[number].share_memory_()
                                shared.append(number)
                            else:
                                waiting.append(number)
                        while shared:
                            number = shared.pop()
                            tensors[number] = torch.full((ELEMENTS,), values[number])
        for number, tensor in enumerate(tensors):
            assert bool((numpy_of(tensor) == values[number]).all()), f"tensor {number} has changed"
        del tensor, tensors[:]


def shared(draw: Draw, place: Path) -> None:
    """While tensors move, a thread puts them where processes share them, as multiprocessing's queues do."""
    _share_and_replace(draw, place, here=False)


def shared_in_a_step(draw: Draw, place: Path) -> None:
    """The same on the thread of the kernels."""
    _share_and_replace(draw, place, here=True)


def reopened(draw: Draw, place: Path) -> None:
    """Runs close and open while another thread allocates."""
    tensors = [torch.full((ELEMENTS,), float(index)) for index in range(10)]

    def allocate(over: threading.Event) -> None:
        own = Draw(draw.random())
        held: list[torch.Tensor] = []
        while not over.is_set():
            held.append(torch.full((own.randrange(1 << 12, ELEMENTS),), 3.0))
            if len(held) > 4:
                gone = held.pop(own.randrange(len(held)))
                assert bool((numpy_of(gone) == 3.0).all()), "another thread's tensor has changed"

    with beside(allocate):
        for _ in range(4):
            with inside(draw, place, draw.choice([9, 11, 14]) * ELEMENTS * 4) as run:
                for _ in range(2):
                    with run.step():
                        tensors.append(torch.full((ELEMENTS,), float(len(tensors))))
                        for index in draw.sample(range(len(tensors)), 4):
                            tensors[index].add_(1).sub_(1)
            for index, tensor in enumerate(tensors):
                assert bool((numpy_of(tensor) == float(index)).all()), f"tensor {index} has changed"
                del tensor


# -- processes ---------------------------------------------------------------------------------------


def _forks(number: int, model: nn.Module) -> list[int]:
    return [digest(numpy_of(parameter)) for parameter in model.parameters()]


def _train_and_look(step: Step) -> Bits:
    return _train(step, in_step=_forks)


def forked(draw: Draw, place: Path) -> None:
    """A process is forked amid a step. It reads all weights; so does its parent, which goes on."""
    wanted, least_bytes = _wanted(_train_and_look)

    def fork(number: int, model: nn.Module) -> list[int]:
        if draw.random() < 0.5:
            return _forks(number, model)
        views = [numpy_of(parameter) for parameter in model.parameters()]
        here, there = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.dup2(there, 2)
                os.write(there, repr([digest(view) for view in views]).encode())
            finally:
                os._exit(0)
        os.close(there)
        try:
            if not select.select([here], [], [], LIMIT_S / 2)[0]:
                os.kill(child, signal.SIGABRT)
                raise AssertionError("a forked process does not answer")
            with open(here, closefd=False) as answer:
                found = answer.read()
        finally:
            os.close(here)
            os.waitpid(child, 0)
        if "were out of memory at fork(), and the parent has written others in their place" in found:
            happened["refused in a child"] += 1  # what moves in the background may be faster than the child
            return _forks(number, model)
        assert found.startswith("["), "a forked process could not read the weights"
        return [int(part) for part in found.strip("[]").split(",")]

    torch.manual_seed(7)
    with inside(draw, place, least_bytes) as run:
        found = _train(run.step, in_step=fork)
    require_same(found, wanted)


def _train_together(step: Step) -> Bits:
    def wrap(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, bucket_cap_mb=0.05, init_sync=False)

    return _train(step, steps=3, wrap=wrap, first=100 * dist.get_rank())


def as_rank(draw: Draw, place: Path) -> None:
    """What `ranks` does, in each of its processes."""
    wanted, least_bytes = _wanted(_train_together)
    torch.manual_seed(7)
    with inside(draw, place, least_bytes + (1 << 15)) as run:
        found = _train_together(run.step)
    require_same(found, wanted)


def ranks(draw: Draw, place: Path) -> None:
    """Gradients are averaged over two processes by DistributedDataParallel."""
    tell, hear = _peer()
    seed = draw.randrange(1 << 30)
    tell.write(f"{seed} {delays.current()}\n")
    tell.flush()
    as_rank(Draw(seed), place)
    assert hear.readline() == "passed\n", "the other rank has failed"


@functools.cache
def _peer() -> tuple[IO[str], IO[str]]:
    """The other rank, which lives as long as this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.stress", "--peer", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    join(address, 0)
    return process.stdin, process.stdout


def join(address: str, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=LIMIT_S)
    )


# -- saving, and failing -----------------------------------------------------------------------------


def saved(draw: Draw, place: Path) -> None:
    """A run that fails is followed by another. Its weights are saved in the background while they change."""
    wanted, least_bytes = _wanted(_train_and_look)
    torch.manual_seed(7)
    handles: list[tuple[Path, Any, list[int]]] = []

    def save(number: int, model: nn.Module) -> list[int]:
        path = place / f"weights-{number}"
        handle = penstock.save(dict(model.state_dict()), path, wait=False)
        known = _forks(number, model)
        handles.append((path, handle, known))
        return known

    with (
        contextlib.suppress(BudgetTooSmall),
        inside(draw, place, least_bytes // draw.choice([2, 3, 8])) as run,
    ):
        _train(run.step)
    torch.manual_seed(7)
    with inside(draw, place, least_bytes) as run:
        found = _train(run.step, in_step=save)
    require_same(found, wanted)
    for path, handle, known in handles:
        handle.wait(LIMIT_S)
        held = penstock.load(path)
        assert [digest(numpy_of(tensor)) for tensor in held.values()] == known, f"{path.name} has other bits"
        path.unlink()


PROGRAMS: dict[str, Callable[[Draw, Path], None]] = {
    program.__name__: program
    for program in (
        minimum,
        unplanned,
        reader,
        recomputed,
        shared,
        shared_in_a_step,
        reopened,
        forked,
        saved,
        ranks,  # the last: what its process group changes stays
    )
}
