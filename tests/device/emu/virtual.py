"""Virtual time, as Python sees it: what a stretch of it was spent on, and how threads hand it over.

A thread that wakes another one by a `threading.Condition`, and by what is made of it (`Event`,
`queue.Queue`), gives it its clock: the other cannot be earlier. Nor is who takes an item out of a
`queue.SimpleQueue` earlier than who put it there. Locks hand nothing over.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from .machines import Machine

# As in native/virtual.h.
_KINDS = ("", "kernel", "to_device", "to_host", "disk_read", "disk_write")
_CAUSES = ("copies", "host", "kernels", "copies", "memory", "memory", "copies")
# The links of each way, and the cause of idle time that they can be.
_WAYS = {"copies": ("to_device", "disk_read"), "memory": ("to_host", "disk_write")}


class _Machine(ctypes.Structure):
    _fields_ = [
        ("memory_bytes_per_s", ctypes.c_double),
        ("link_bytes_per_s", ctypes.c_double * 4),
        ("operations_per_s", ctypes.c_double * 4),
        ("kernel_s", ctypes.c_double),
        ("launch_s", ctypes.c_double),
        ("disk_latency_s", ctypes.c_double),
    ]


class _Moment(ctypes.Structure):
    _fields_ = [("epoch", ctypes.c_int64), ("at_s", ctypes.c_double), ("cause", ctypes.c_int)]


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
    """An item of work, or a transfer between host memory and the disk.

    kind     "kernel", "to_device", "to_host", "disk_read" or "disk_write"
    stream   -1 of a transfer
    free_s   when its stream had nothing else to do, or the disk could have begun
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
    """A direction of the bus, or of the disk.

    limiting_s        that the device was idle and waited for a copy that way, of which this link carried more
                      than the other one
    limiting_gaps_s   of that: it carried nothing
    """

    busy_s: float
    size_bytes: int
    copies: int
    limiting_s: float
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
    disk_read: Link
    disk_write: Link
    waits: int
    waited_s: float
    early: int

    @property
    def idle_s(self) -> float:
        return self.step_s - self.busy_s

    @property
    def links(self) -> Mapping[str, Link]:
        """By kind of span."""
        return {kind: getattr(self, kind) for way in _WAYS.values() for kind in way}

    def __str__(self) -> str:
        causes = ", ".join(f"{cause} {1e3 * idle_s:.3f}" for cause, idle_s in self.idle_s_by_cause.items())
        lines = [
            f"virtual time on {self.machine}, in ms: {1e3 * self.step_s:.3f}",
            f"  device: {self.kernels} kernels, busy {1e3 * self.busy_s:.3f}, idle {1e3 * self.idle_s:.3f}, "
            f"late for {causes}",
        ]
        lines += [
            f"  {name}: {link.copies} copies of {link.size_bytes} bytes, busy {1e3 * link.busy_s:.3f}, "
            f"waited for {1e3 * link.limiting_s:.3f}, with gaps of {1e3 * link.limiting_gaps_s:.3f}"
            for name, link in self.links.items()
            if link.copies
        ]
        early = f"; {self.early} times a helper was early" if self.early else ""
        return "\n".join([*lines, f"  host: {self.waits} waits, {1e3 * self.waited_s:.3f}{early}"])


class VirtualTime:
    """Virtual time of the device that is compiled in ``native``."""

    def __init__(self, native: Any) -> None:
        self._native = native
        native.emu_now_s.restype = ctypes.c_double
        native.emu_disk.restype = _Moment
        native.emu_await.restype = None
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
        links = (getattr(machine, f"{kind}_bytes_per_s") for kind in _KINDS[2:])
        given = _Machine(
            machine.memory_bytes_per_s,
            (ctypes.c_double * 4)(*links),
            (ctypes.c_double * 4)(machine.fp64, machine.fp32, machine.tf32, machine.bf16),
            machine.kernel_s,
            machine.launch_s,
            machine.disk_latency_s,
        )
        self._native.emu_set_machine(ctypes.byref(given))
        self._patches.enter_context(_handing_over(self._native))

    def begin_transfer(self, kind: str, size_bytes: int) -> Any:
        return self._native.emu_disk(_KINDS.index(kind), ctypes.c_double(size_bytes))

    def wait_until(self, end: Any) -> None:
        self._native.emu_await(end)

    def now_s(self) -> float:
        return float(self._native.emu_now_s())

    def reset(self) -> None:
        self._native.emu_clear_log()
        self._begun_s = self.now_s()

    def spans(self) -> list[Span]:
        return [
            Span(
                s.name.decode(), _KINDS[s.kind], s.stream, s.free_s, s.launched_s, s.begin_s, s.end_s,
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

    carried = {kind: [s for s in spans if s.kind == kind] for way in _WAYS.values() for kind in way}
    busy = {kind: _union((s.begin_s, s.end_s) for s in of_kind) for kind, of_kind in carried.items()}
    limiting: dict[str, list[tuple[float, float]]] = {
        kind: [] for kind in carried
    }  # of each wait: s, and gaps
    for cause, way in _WAYS.items():
        for stretch in idle[cause]:
            busy_s, kind = max((_length(_common([stretch], busy[kind])), kind) for kind in way)
            limiting[kind].append((_length([stretch]), _length([stretch]) - busy_s))

    def link(kind: str) -> Link:
        return Link(
            busy_s=_length(busy[kind]),
            size_bytes=sum(span.size_bytes for span in carried[kind]),
            copies=len(carried[kind]),
            limiting_s=sum(length_s for length_s, _ in limiting[kind]),
            limiting_gaps_s=sum(gaps_s for _, gaps_s in limiting[kind]),
        )

    idle_s = {cause: _length(stretches) for cause, stretches in idle.items()}
    return Report(
        machine=machine,
        step_s=end_s - begun_s,
        busy_s=end_s - begun_s - sum(idle_s.values()),
        idle_s_by_cause=idle_s,
        kernels=len(kernels),
        **{kind: link(kind) for kind in carried},
        waits=len(waits),
        waited_s=sum(wait.end_s - max(wait.begin_s, begun_s) for wait in waits),
        early=early,
    )


def _length(stretches: Iterable[tuple[float, float]]) -> float:
    return sum(end_s - begin_s for begin_s, end_s in stretches)


def _union(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """They ascend, without overlaps."""
    found: list[tuple[float, float]] = []
    for begin_s, end_s in sorted(stretches):
        if found and begin_s <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end_s)
        else:
            found.append((begin_s, end_s))
    return found


def _common(
    first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """Of two sequences that ascend, without overlaps."""
    for begin_s, end_s in first:
        for index in range(bisect_right(second, begin_s, key=itemgetter(1)), len(second)):
            other_begin_s, other_end_s = second[index]
            if other_begin_s >= end_s:
                break
            yield max(begin_s, other_begin_s), min(end_s, other_end_s)


def _read(function: Any, kind: type[ctypes.Structure]) -> Any:
    count = function(None, ctypes.c_int64(0))
    found = (kind * count)()
    return found[: min(function(found, ctypes.c_int64(count)), count)]


@contextlib.contextmanager
def _handing_over(native: Any) -> Iterator[None]:
    """Meanwhile, conditions and queues hand clocks over."""
    now_s: Callable[[], float] = native.emu_now_s

    class Handing(queue.Queue[Any]):
        """Instead of `queue.SimpleQueue`. Items carry the clock of who put them."""

        def _put(self, item: Any) -> None:
            super()._put((now_s(), item))

        def _get(self) -> Any:
            at_s, item = super()._get()
            native.emu_reach(ctypes.c_double(at_s))
            return item

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
    simple, queue.SimpleQueue = queue.SimpleQueue, Handing  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        queue.SimpleQueue = simple  # type: ignore[misc]
        threading.Condition.wait = wait  # type: ignore[method-assign]
        threading.Condition.notify = notify  # type: ignore[method-assign]
