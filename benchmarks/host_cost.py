"""What the runtime costs the host on an accelerator: a kernel and a view where nothing moves, a copy, and a
kernel of training at half of its memory.

    python benchmarks/host_cost.py [--rounds 15]

The device is a stand-in whose kernels take no time, over small tensors in host memory: all that is timed is
the host's work. Plain PyTorch, an empty dispatch mode and penstock take turns; medians over rounds, in
microseconds above plain PyTorch. The empty mode is what torch itself takes to call any Python mode.

For copies, one tensor leaves and one comes at each kernel. A copy is over COPY_S after the one before it on
its stream, and who waits for that sleeps. What it costs is the difference to the same kernels with nothing
moved, by the clock on the wall and in seconds of the processor.

Training is a GPT's with AdamW, on the emulated device of the tests (tests/device/emu), whose kernels and
copies do nothing: what a step takes beyond a plain one, for each kernel of the plain one. Nothing goes to
disk.

But for copies all times are the processor's, on the program's thread: neither what waits counts nor what else
runs on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import penstock
from penstock.capture import slices
from penstock.capture.recorder import make_trace
from penstock.runtime.copy_engine import CopyEngine
from penstock.runtime.devices.accelerator import AcceleratorDevice
from penstock.runtime.devices.driver import Memory
from penstock.runtime.offload_mode import OffloadMode
from penstock.runtime.recording import Recording
from penstock.runtime.schedule import Action, EvictAction, PrefetchAction, ReleaseAction, unplanned
from penstock.runtime.storage_methods import resize
from penstock.storage.spill import SpillSpace

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import accelerator  # noqa: E402
from tests.support.families import _Gpt, _words  # noqa: E402
from tests.support.runs import ACCELERATED  # noqa: E402

KERNELS = 2000  # a step
BUDGET_BYTES = 1 << 30
MOVED, AHEAD = 50, 10  # tensors, and so many kernels ahead of its own each is asked for
COPY_S = 20e-6  # of 1 MiB over PCIe 5
HARDWARE = replace(ACCELERATED, device_to_host_bytes_per_s=5e10, host_to_device_bytes_per_s=5e10)
STEPS, TIMED_STEPS = 24, 6  # of training; the last ones are timed


class _Stream:
    """busy_until_s   when the last copy is over"""

    busy_until_s = 0.0

    def wait_event(self, event: _Event) -> None:
        self.busy_until_s = max(self.busy_until_s, event.at_s)

    def synchronize(self) -> None:
        if self.busy_until_s > time.perf_counter():
            time.sleep(self.busy_until_s - time.perf_counter())


class _Event:
    at_s = 0.0

    def record(self, stream: _Stream) -> None:
        self.at_s = stream.busy_until_s

    def query(self) -> bool:
        return self.at_s <= time.perf_counter()

    def synchronize(self) -> None:
        if not self.query():
            time.sleep(self.at_s - time.perf_counter())

    def elapsed_time(self, other: _Event) -> float:
        return (other.at_s - self.at_s) * 1e3


class IdleDriver:
    """See penstock.runtime.devices.driver.Driver: copies take time, and do nothing."""

    device = torch.device("cpu")
    memory_manager = "idle"
    total_bytes = free_bytes = 1 << 40

    def __init__(self) -> None:
        self.stream = _Stream()

    def make_stream(self) -> Any:
        return _Stream()

    def make_event(self, timed: bool = False) -> Any:
        return _Event()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: _Stream) -> None:
        stream.busy_until_s = max(stream.busy_until_s, time.perf_counter()) + COPY_S

    def use_device(self) -> None:
        pass

    def current_stream(self) -> Any:
        return self.stream

    def resize(self, storage: torch.UntypedStorage, size_bytes: int, stream: Any) -> bool:
        resize(storage, size_bytes)
        return True

    def set_access_error(self, storage: torch.UntypedStorage, text: str | None) -> None:
        pass

    def page_lock(self, address: int, size_bytes: int) -> bool:
        return True

    def page_unlock(self, address: int) -> None:
        pass

    def reserve(self, size_bytes: int, stream: Any) -> int | None:
        return None

    def allocated_bytes(self) -> int:
        return 0

    def memory(self) -> Memory:
        return Memory(0, 0, 0, 0)

    def reset_peaks(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def limit(self, reserved_bytes: int | None) -> None:
        pass

    def is_out_of_memory(self, error: BaseException) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def profiler_range(self, text: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class EmptyMode(TorchDispatchMode):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operator(*args, **(kwargs or {}))


@contextlib.contextmanager
def clock_of(directory: Path) -> Iterator[OffloadMode]:
    with contextlib.closing(SpillSpace([directory])) as spill:
        device = AcceleratorDevice(spill, IdleDriver(), BUDGET_BYTES, 16 << 20, chunk_bytes=1 << 20, chunks=2)
        engine = CopyEngine(device, BUDGET_BYTES)
        device.engine = engine
        clock = OffloadMode(device, engine, smallest_bytes=1)
        clock.start()
        try:
            yield clock
        finally:
            clock.stop()
            engine.drain()
            device.close()


def kernels(x: torch.Tensor, y: torch.Tensor) -> None:
    for _ in range(KERNELS):
        x.add_(y)


def results(x: torch.Tensor, y: torch.Tensor) -> None:
    for _ in range(KERNELS):
        torch.add(x, y)


def views(x: torch.Tensor, y: torch.Tensor) -> None:
    for _ in range(KERNELS):
        x.view(-1)


def timed(work: Callable[[torch.Tensor, torch.Tensor], None], x: torch.Tensor, y: torch.Tensor) -> float:
    begun_s = time.thread_time()
    work(x, y)
    return (time.thread_time() - begun_s) / KERNELS * 1e6


def copies(rounds: int) -> str:
    """What a copy costs, and how many there were: one that comes late may not be needed any more."""
    took: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    moved = []
    with tempfile.TemporaryDirectory() as place, torch.no_grad(), clock_of(Path(place)) as clock:
        tensors, y = [torch.zeros(1024) for _ in range(MOVED)], torch.ones(1024)

        def work() -> None:
            for kernel in range(KERNELS):
                tensors[kernel % MOVED].add_(y)

        recording = Recording()
        clock.begin_step([], recording)
        work()
        clock.end_step()
        trace = make_trace(recording.kernels, recording.tensors, measured=True)
        before: list[list[Action]] = [[] for _ in range(KERNELS)]
        for kernel in range(1, KERNELS):
            last, next_one = (int(trace.outputs[at % KERNELS][0]) for at in (kernel - 1, kernel + AHEAD))
            before[kernel] += [
                EvictAction(last, "host"),
                ReleaseAction(last),
                PrefetchAction(next_one, keeps_copy=False),
            ]
        begins_s = tuple(kernel * COPY_S for kernel in range(KERNELS))
        planned = replace(unplanned(trace, before), begins_s=begins_s)
        engine = clock._engine
        for _ in range(rounds):
            for moves in (True, False):
                engine.begin_step()
                clock.begin_step([planned if moves else unplanned(trace)], None)
                begun = time.perf_counter(), time.process_time()
                work()
                ended = time.perf_counter(), time.process_time()
                clock.end_step()
                engine.drain()
                took[moves].append((ended[0] - begun[0], ended[1] - begun[1]))
                if moves:
                    moved.append(len(engine.moved))
    count = statistics.median(moved)
    wall_us, processor_us = (
        (statistics.median(row) - statistics.median(still)) / count * 1e6
        for row, still in zip(zip(*took[True], strict=True), zip(*took[False], strict=True), strict=True)
    )
    return f"copies, {count} of {2 * KERNELS}: +{wall_us:.1f} us, of the processor +{processor_us:.1f}"


class Counting(TorchDispatchMode):
    """kernels   operators that give no view"""

    kernels = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels += not operator.is_view
        return operator(*args, **(kwargs or {}))


def steps_s(step: Callable[[], contextlib.AbstractContextManager[Any]], steps: int = STEPS) -> list[float]:
    """What each of the last steps takes."""
    with torch.device("emu"):
        model = _Gpt(width=512, heads=8, blocks=6)
    optimizer = torch.optim.AdamW(model.parameters())
    took = []
    for number in range(steps):
        words = _words(number, 8, 256).to("emu")
        begun_s = time.thread_time()
        with step():
            F.cross_entropy(model(words).flatten(0, 1), words.roll(-1, 1).flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        took.append(time.thread_time() - begun_s)
    return took[-TIMED_STEPS:]


def training(rounds: int) -> Iterator[str]:
    emulated = accelerator.load("emu")
    slices.LEAST_BYTES.pop("emu", None)  # as on other accelerators

    def in_turn(budget_bytes: int) -> tuple[list[float], penstock.Report]:
        gc.collect()
        torch.accelerator.empty_cache()
        emulated.configure(order="eager", computes=False)
        with (
            tempfile.TemporaryDirectory() as place,
            penstock.offload(
                device="emu:0",
                device_budget=budget_bytes,
                host_budget="2GiB",
                spill_dir=place,
                hardware=HARDWARE,
            ) as run,
        ):
            took = steps_s(run.step)
            return took, run.report()

    emulated.configure(order="eager", computes=False)
    counted = [Counting(), Counting()]  # the first step makes the optimizer's state
    in_order = iter(counted)
    steps_s(lambda: next(in_order), len(counted))
    kernels = counted[-1].kernels
    _, report = in_turn(2 << 30)
    budgets = {"all": 2 << 30, "half": report.peak_bytes // 2}
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, step in (("plain", contextlib.nullcontext), ("empty mode", EmptyMode)):
            times.setdefault(name, []).extend(steps_s(step))
        for name, budget_bytes in budgets.items():
            took, report = in_turn(budget_bytes)
            times.setdefault(name, []).extend(took)
    plain_s = statistics.median(times["plain"])
    yield f"training, {kernels} kernels a step: plain {plain_s * 1e3:.1f} ms"
    for name, values in times.items():
        if name != "plain":
            low, middle, high = (
                (value - plain_s) / kernels * 1e6
                for value in (min(values), statistics.median(values), max(values))
            )
            yield f"{name}: +{middle:.1f} us a kernel ({low:.1f} to {high:.1f})"
    yield f"at half, evicted a step: {report.evicted_bytes >> 20} MiB of {report.predicted_peak_bytes >> 20}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for work in (kernels, results, views):
        times: dict[str, list[float]] = {"plain": [], "empty mode": [], "penstock": []}
        with tempfile.TemporaryDirectory() as place, torch.no_grad(), clock_of(Path(place)) as clock:
            x, y = torch.zeros(1), torch.ones(1)
            recording = Recording()
            clock.begin_step([], recording)
            work(x, y)
            clock.end_step()
            trace = make_trace(recording.kernels, recording.tensors, measured=True)
            schedule = unplanned(trace) if recording.kernels else None
            for _ in range(rounds):
                clock.begin_step([schedule] if schedule else [], None)
                times["penstock"].append(timed(work, x, y))
                clock.end_step()
                clock.stop()
                times["plain"].append(timed(work, x, y))
                with EmptyMode():
                    times["empty mode"].append(timed(work, x, y))
                clock.start()
        plain = statistics.median(times["plain"])
        row = ", ".join(
            f"{name} +{statistics.median(values) - plain:.2f}"
            f" ({min(values) - plain:.2f} to {max(values) - plain:.2f})"
            for name, values in times.items()
            if name != "plain"
        )
        print(f"{work.__name__}: plain {plain:.2f} us; {row}")
    print(copies(rounds))
    for line in training(max(rounds // 5, 1)):
        print(line)


if __name__ == "__main__":
    main()
