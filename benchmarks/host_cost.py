"""What the runtime costs the host for each kernel and each view, on an accelerator where nothing moves.

    python benchmarks/host_cost.py [--rounds 15]

The device is a stand-in whose streams do nothing, over tensors of one element in host memory: all that is
timed is the host's work. Plain PyTorch, an empty dispatch mode and penstock take turns; medians over rounds,
in microseconds above plain PyTorch. The empty mode is what torch itself takes to call any Python mode.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.capture.recorder import make_trace
from penstock.runtime.clock import Clock
from penstock.runtime.copy_engine import CopyEngine
from penstock.runtime.devices.accelerator import AcceleratorDevice
from penstock.runtime.devices.driver import Memory
from penstock.runtime.recording import Recording
from penstock.runtime.schedule import unplanned
from penstock.storage.spill import SpillSpace

KERNELS = 2000  # a step
BUDGET_BYTES = 1 << 30


class _Idle:
    """A stream, or an event."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None

    def elapsed_time(self, other: _Idle) -> float:
        return 0.0


class IdleDriver:
    """See penstock.runtime.devices.driver.Driver: copies and waits do nothing."""

    device = torch.device("cpu")
    memory_manager = "idle"
    total_bytes = free_bytes = 1 << 40

    def __init__(self) -> None:
        self.stream = _Idle()

    def make_stream(self) -> Any:
        return _Idle()

    def make_event(self, timed: bool = False) -> Any:
        return _Idle()

    def current_stream(self) -> Any:
        return self.stream

    def resize(self, storage: torch.UntypedStorage, size_bytes: int, stream: Any) -> bool:
        storage.resize_(size_bytes)
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

    def marked(self, text: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class EmptyMode(TorchDispatchMode):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operator(*args, **(kwargs or {}))


@contextlib.contextmanager
def clock_of(directory: Path) -> Iterator[Clock]:
    with contextlib.closing(SpillSpace([directory])) as spill:
        device = AcceleratorDevice(spill, IdleDriver(), BUDGET_BYTES, 16 << 20, chunk_bytes=1 << 20, chunks=2)
        engine = CopyEngine(device, BUDGET_BYTES)
        device.engine = engine
        clock = Clock(device, engine, smallest_bytes=1)
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
    begun_s = time.perf_counter()
    work(x, y)
    return (time.perf_counter() - begun_s) / KERNELS * 1e6


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
            f"{name} +{statistics.median(values) - plain:.2f} (from {min(values) - plain:.2f})"
            for name, values in times.items()
            if name != "plain"
        )
        print(f"{work.__name__}: plain {plain:.2f} us; {row}")


if __name__ == "__main__":
    main()
