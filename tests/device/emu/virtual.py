"""Virtual time, as Python sees it: what a stretch of it was spent on, and how threads hand it over.

A thread that wakes another one by a `threading.Condition`, and by what is made of it (`Event`,
`queue.Queue`), gives it its clock: the other cannot be earlier. Locks and `queue.SimpleQueue` hand nothing
over.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .machines import Machine

# As in native/virtual.h.
_KERNEL, _TO_DEVICE, _TO_HOST = 1, 2, 3
_CAUSES = ("copies", "host", "kernels", "copies", "memory", "memory", "copies")
_HOST = 1


class _Machine(ctypes.Structure):
    _fields_ = [
        ("memory_bytes_per_s", ctypes.c_double),
        ("to_device_bytes_per_s", ctypes.c_double),
        ("to_host_bytes_per_s", ctypes.c_double),
        ("operations_per_s", ctypes.c_double * 4),
        ("kernel_s", ctypes.c_double),
        ("launch_s", ctypes.c_double),
    ]


class _Span(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("free_s", ctypes.c_double),
        ("launched_s", ctypes.c_double),
        ("begin_s", ctypes.c_double),
        ("end_s", ctypes.c_double),
        ("bytes", ctypes.c_double),
        ("kind", ctypes.c_int),
        ("stream", ctypes.c_int),
        ("cause", ctypes.c_int),
    ]


class _Wait(ctypes.Structure):
    _fields_ = [
        ("begin_s", ctypes.c_double),
        ("end_s", ctypes.c_double),
        ("cause", ctypes.c_int),
        ("is_program", ctypes.c_int),
    ]


class Span(NamedTuple):
    """An item of work.

    kind     "kernel", "to_device" or "to_host"
    free_s   when its stream had nothing else to do
    cause    why it did not begin then: a key of `Report.idle_s_by_cause`
    """

    name: str
    kind: str
    stream: int
    free_s: float
    launched_s: float
    begin_s: float
    end_s: float
    size_bytes: int
    cause: str


class Wait(NamedTuple):
    """A thread of the host waited."""

    begin_s: float
    end_s: float
    cause: str
    is_program: bool


@dataclass(frozen=True, kw_only=True)
class Link:
    """A direction of the bus.

    limiting_gaps_s   that it had while the device waited for a copy that way
    """

    busy_s: float
    size_bytes: int
    copies: int
    limiting_gaps_s: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """A stretch of virtual time.

    step_s           until the program's clock, or the end of the last item, where that is later
    busy_s           while a kernel ran
    idle_s_by_cause  of the rest, what the kernel at its end was late for. "copies": it waited for one to the
                     device, or the host that launched it did. "memory": for one to the host, or the host did,
                     or the allocator waited for the device to find room. "kernels": for those of another
                     stream. "host": it was launched late for another reason, or there was no other kernel
    waits, waited_s  of the program's threads, which had to
    early            times that a helper thread went on before the program's clock was there, since nothing
                     else happened: what it did then may have been seen before its time
    """

    machine: str
    step_s: float
    busy_s: float
    idle_s_by_cause: Mapping[str, float]
    kernels: int
    to_device: Link
    to_host: Link
    waits: int
    waited_s: float
    early: int

    @property
    def idle_s(self) -> float:
        return self.step_s - self.busy_s

    def __str__(self) -> str:
        causes = ", ".join(f"{cause} {1e3 * idle_s:.3f}" for cause, idle_s in self.idle_s_by_cause.items())
        lines = [
            f"virtual time on {self.machine}, in ms: {1e3 * self.step_s:.3f}",
            f"  device: {self.kernels} kernels, busy {1e3 * self.busy_s:.3f}, idle {1e3 * self.idle_s:.3f}, "
            f"late for {causes}",
        ]
        lines += [
            f"  {name}: {link.copies} copies of {link.size_bytes} bytes, busy {1e3 * link.busy_s:.3f}, "
            f"gaps while it was waited for {1e3 * link.limiting_gaps_s:.3f}"
            for name, link in (("to the device", self.to_device), ("to the host", self.to_host))
        ]
        early = f"; {self.early} times a helper was early" if self.early else ""
        return "\n".join([*lines, f"  host: {self.waits} waits, {1e3 * self.waited_s:.3f}{early}"])


class VirtualTime:
    """Virtual time of the device that is compiled in ``native``."""

    def __init__(self, native: Any) -> None:
        self._native = native
        native.emu_now_s.restype = ctypes.c_double
        for function in (native.emu_thread, native.emu_early, native.emu_spans, native.emu_host_waits):
            function.restype = ctypes.c_int64
        self._machine: Machine | None = None
        self._begun_s = 0.0
        self._patches = contextlib.ExitStack()

    def configure(self, machine: Machine | None) -> None:
        """Begin at 0 again; None: there is no virtual time."""
        self._patches.close()
        self._machine = machine
        self._begun_s = 0.0
        if machine is None:
            self._native.emu_set_machine(None)
            return
        rates = (ctypes.c_double * 4)(machine.fp64, machine.fp32, machine.tf32, machine.bf16)
        given = _Machine(
            machine.memory_bytes_per_s,
            machine.to_device_bytes_per_s,
            machine.to_host_bytes_per_s,
            rates,
            machine.kernel_s,
            machine.launch_s,
        )
        self._native.emu_set_machine(ctypes.byref(given))
        self._patches.enter_context(_handing_over(self._native))

    def now_s(self) -> float:
        return float(self._native.emu_now_s())

    def reset(self) -> None:
        self._native.emu_clear_log()
        self._begun_s = self.now_s()

    def spans(self) -> list[Span]:
        kinds = ("", "kernel", "to_device", "to_host")
        return [
            Span(
                s.name.decode(), kinds[s.kind], s.stream, s.free_s, s.launched_s, s.begin_s, s.end_s,
                int(s.bytes), _CAUSES[s.cause],
            )
            for s in _read(self._native.emu_spans, _Span)
        ]  # fmt: skip

    def waits(self) -> list[Wait]:
        return [
            Wait(w.begin_s, w.end_s, _CAUSES[w.cause], bool(w.is_program))
            for w in _read(self._native.emu_host_waits, _Wait)
        ]

    def report(self) -> Report:
        if self._machine is None:
            raise RuntimeError("there is no virtual time: name a machine to emu.configure")
        early = int(self._native.emu_early())
        return reported(self._machine.name, self.spans(), self.waits(), self._begun_s, self.now_s(), early)


def reported(
    machine: str, spans: Sequence[Span], waits: Sequence[Wait], begun_s: float, now_s: float, early: int = 0
) -> Report:
    """What happened from ``begun_s`` on."""
    spans = [span for span in spans if span.begin_s >= begun_s]
    end_s = max([now_s, *(span.end_s for span in spans)])
    kernels = sorted((s for s in spans if s.kind == "kernel"), key=lambda span: span.begin_s)
    waits = [wait for wait in waits if wait.is_program and wait.end_s > begun_s]
    idle: dict[str, list[tuple[float, float]]] = {"host": [], "copies": [], "memory": [], "kernels": []}

    def late(begin_s: float, until_s: float, cause: str) -> None:
        """Nothing ran. Where the host was late for something else, that is the cause."""
        if cause == "host":
            for wait in waits:
                if wait.cause in ("copies", "memory"):
                    first_s, last_s = max(wait.begin_s, begin_s), min(wait.end_s, until_s)
                    if first_s < last_s:
                        idle["host"].append((begin_s, first_s))
                        idle[wait.cause].append((first_s, last_s))
                        begin_s = last_s
        idle[cause].append((begin_s, until_s))

    free_s = begun_s
    for kernel in kernels:
        if kernel.begin_s > free_s:
            late(free_s, kernel.begin_s, kernel.cause)
        free_s = max(free_s, kernel.end_s)
    late(free_s, end_s, "host")

    def link(kind: str, cause: str) -> Link:
        copies = sorted((span for span in spans if span.kind == kind), key=lambda span: span.begin_s)
        busy = [(copy.begin_s, copy.end_s) for copy in copies]
        return Link(
            busy_s=_length(busy),
            size_bytes=sum(copy.size_bytes for copy in copies),
            copies=len(copies),
            limiting_gaps_s=_length(idle[cause]) - _length(_common(idle[cause], busy)),
        )

    idle_s = {cause: _length(stretches) for cause, stretches in idle.items()}
    return Report(
        machine=machine,
        step_s=end_s - begun_s,
        busy_s=end_s - begun_s - sum(idle_s.values()),
        idle_s_by_cause=idle_s,
        kernels=len(kernels),
        to_device=link("to_device", "copies"),
        to_host=link("to_host", "memory"),
        waits=len(waits),
        waited_s=sum(wait.end_s - max(wait.begin_s, begun_s) for wait in waits),
        early=early,
    )


def _length(stretches: Iterable[tuple[float, float]]) -> float:
    return sum(end_s - begin_s for begin_s, end_s in stretches)


def _common(
    first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """Of two sequences that ascend, without overlaps."""
    position = 0
    for begin_s, end_s in first:
        while position < len(second) and second[position][1] <= begin_s:
            position += 1
        for other_begin_s, other_end_s in second[position:]:
            if other_begin_s >= end_s:
                break
            yield max(begin_s, other_begin_s), min(end_s, other_end_s)


def _read(function: Any, kind: type[ctypes.Structure]) -> Any:
    count = function(None, ctypes.c_int64(0))
    found = (kind * count)()
    return found[: min(function(found, ctypes.c_int64(count)), count)]


@contextlib.contextmanager
def _handing_over(native: Any) -> Iterator[None]:
    """Meanwhile, conditions hand clocks over."""
    wait: Callable[..., bool] = threading.Condition.wait
    notify: Callable[..., None] = threading.Condition.notify

    def waiting(self: threading.Condition, timeout: float | None = None) -> bool:
        threads = self.__dict__.setdefault("_emu_threads", [])
        thread = native.emu_thread()
        threads.append(thread)
        native.emu_blocked(1)
        try:
            return wait(self, timeout)
        finally:
            native.emu_blocked(0)
            if thread in threads:
                threads.remove(thread)

    def notifying(self: threading.Condition, n: int = 1) -> None:
        threads = self.__dict__.get("_emu_threads", [])
        for thread in threads[:n]:
            native.emu_wakes(ctypes.c_int64(thread))
        del threads[:n]
        notify(self, n)

    threading.Condition.wait = waiting  # type: ignore[method-assign]
    threading.Condition.notify = notifying  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Condition.wait = wait  # type: ignore[method-assign]
        threading.Condition.notify = notify  # type: ignore[method-assign]
