"""Averages tensors over the ranks of one machine, through shared host memory.

A tensor is processed in pieces, by reduce-scatter and all-gather. Each rank copies its piece to its own
slot, sums its share of the elements over all slots, in the order of the ranks, and copies the whole result
back. So all ranks get the same bits, every time. While one piece is summed, the next is copied in, and the
one before is copied back.

This runs on a thread, for one tensor after the other; pieces are numbered across tensors. Three pieces are
in flight, and ranks wait twice for each: until all have filled their slots, and until all have summed their
shares. So slots can be reused safely: a rank that fills the slot of piece k for piece k + 3 knows that all
have summed piece k, and a rank that sums piece k + 3 knows that all have filled their slots for it, which
they do after they have copied the result of piece k.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.futures import Future

from penstock._native import RankProgress, Stage
from penstock.distributed.segment import SharedSegment
from penstock.errors import DistributedError, InvalidArgument
from penstock.runtime.devices.driver import Driver
from penstock.units import format_bytes, format_seconds

logger = logging.getLogger("penstock")

PIECE_BYTES = 2 << 20
_RATES_S = 0.05  # to measure a rate for
_CLOSE_S = 10.0  # to wait for tensors in flight
_ALIGNMENT = 64  # elements: no two ranks write one cache line

# The dtype in which gradients are summed, before they are rounded once.
SUMMED_IN = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
_DTYPES = tuple(SUMMED_IN)

_WHY = {
    "late": "it has not brought its gradients within the time limit of the process group, {limit}. See what "
    "it is doing, or give init_process_group a longer timeout",
    "gone": "its process has ended. Look for its error",
    "failed": "it has stopped exchanging gradients. Look for its error",
}


class GradientCopies:
    """Copies to the shared memory and back: for an accelerator, on a stream of their own.

    driver   of the accelerator; None: tensors are in host memory, and copies are synchronous
    """

    def __init__(self, driver: Driver | None) -> None:
        self._driver = driver
        self._stream: Any = driver.make_stream() if driver is not None else None
        self._is_locked = False

    def lock(self, address: int, size_bytes: int) -> None:
        """Page-lock the shared memory, where that makes copies faster."""
        if self._driver is None:
            return
        self._is_locked = self._driver.page_lock(address, size_bytes)
        if not self._is_locked:
            logger.warning(
                "%s of shared host memory cannot be page-locked: gradients take longer to the host and back",
                format_bytes(size_bytes),
            )

    def unlock(self, address: int) -> None:
        if self._driver is not None and self._is_locked:
            self._driver.page_unlock(address)

    def begin(self) -> Any:
        """An event after the kernels issued so far, for `copy` to wait for."""
        if self._driver is None:
            return None
        ready = self._driver.make_event()
        ready.record(self._driver.current_stream())
        return ready

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        """Start a copy. Returns the event at its end."""
        if self._driver is None:
            target.copy_(source)
            return None
        self._stream.wait_event(after)
        self._driver.copy(target.view(torch.uint8), source.view(torch.uint8), self._stream)
        done = self._driver.make_event()
        done.record(self._stream)
        return done

    def finish(self, copy: Any) -> None:
        """Wait for the end of a copy."""
        if copy is not None:
            copy.synchronize()


class Average(dist.Work):
    """An average in progress, as torch.distributed's handle of a collective.

    future   its value is the tensor, which then holds the mean
    """

    def __init__(self, tensor: torch.Tensor, after: Any) -> None:
        super().__init__()
        self.tensor, self.after = tensor, after
        self.error: DistributedError | None = None
        devices = [] if tensor.device.type == "cpu" else [tensor.device]
        self.done: Future[torch.Tensor] = Future(devices=devices)
        self.future = self.done.then(self._result)

    def _result(self, done: Future[torch.Tensor]) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return self.tensor

    def is_completed(self) -> bool:
        return self.done.done()

    def wait(self, timeout: Any = None) -> bool:
        self.future.wait()
        return True

    def get_future(self) -> Future[torch.Tensor]:
        return self.future


class Exchange:
    """Averages tensors over the ranks of a process group, all of which make one together.

    driver      of the accelerator with the tensors; None: they are in host memory
    timeout_s   longest wait for another rank
    latest      the last one submitted; referenced here since its boxed Work does not keep it alive

    Raises DistributedError.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        driver: Driver | None,
        timeout_s: float,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.latest: Average
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._names = [dist.get_global_rank(group, rank) for rank in range(self._ranks)]
        copies = self._copies = GradientCopies(driver)
        self._timeout_s = timeout_s
        header_bytes = -(-RankProgress.bytes(self._ranks) // 4096) * 4096
        # Each rank's slots, and those of the results.
        cells = (self._ranks + 1, RankProgress.depth, piece_bytes)
        self._segment = SharedSegment(group, header_bytes + int(np.prod(cells)))
        whole = torch.from_numpy(np.frombuffer(self._segment.memory, np.uint8))
        copies.lock(whole.data_ptr(), whole.nbytes)
        self._progress = RankProgress(whole.data_ptr(), self._ranks, self._rank, self._segment.watched)
        self._cells = {dtype: whole[header_bytes:].view(cells).view(dtype) for dtype in _DTYPES}
        # Not in torch's memory, which may be under a budget: two sums of a share.
        self._sums = torch.from_numpy(np.empty((2, piece_bytes // 2), np.float32))
        self._pieces = 0  # that were exchanged
        self._error: DistributedError | None = None
        self._queue: queue.SimpleQueue[Average | None] = queue.SimpleQueue()
        # The thread ends with this object.
        thread = threading.Thread(target=_serve, args=(weakref.ref(self), self._queue), daemon=True)
        self._stop = weakref.finalize(
            self, _stop, os.getpid(), self._progress, self._queue, thread, self._segment, copies, whole
        )
        thread.start()

    def submit(self, tensor: torch.Tensor) -> Average:
        """Start to average a tensor. All ranks must submit the same tensors in the same order.

        tensor   [elements], which must not be used until it is done
        """
        if tensor.dtype not in SUMMED_IN:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUMMED_IN)
            raise InvalidArgument(
                f"gradients of {tensor.dtype} cannot be accumulated on the host: {known} can. Take "
                "method='all_reduce'"
            )
        if not tensor.is_contiguous():
            raise InvalidArgument("the tensor is not contiguous: give its elements in one piece")
        if self._error is not None:
            raise self._error
        self.latest = average = Average(tensor.view(-1), self._copies.begin())
        self._queue.put(average)
        return average

    def close(self) -> None:
        """Stop. Ranks that still wait for this one get an error."""
        self._stop()
        self._cells.clear()
        self._error = self._error or DistributedError("this HostAccumulation is closed: make another one")

    def rates(self, device: torch.device) -> tuple[float, float]:
        """Bytes per second that this rank copies to the host, and that it sums, while the other ranks do the
        same. Nothing may be in flight."""
        cells = self._cells[torch.float32]
        slots = cells[self._rank]
        source = torch.ones(slots.numel(), device=device).view(slots.shape)

        def copy() -> None:
            after = self._copies.begin()
            for copied in [self._copies.copy(*pair, after) for pair in zip(slots, source, strict=True)]:
                self._copies.finish(copied)

        def add() -> None:
            for slot in range(RankProgress.depth):
                self._sum(cells[:, slot])

        return source.nbytes / _mean_s(copy), source.nbytes / _mean_s(add)

    def _run(self, average: Average) -> None:
        try:
            if self._error is None:
                self._average(average)
        except Exception as error:
            self._progress.fail()
            self._error = error if isinstance(error, DistributedError) else DistributedError(str(error))
        average.error = self._error
        average.done.set_result(average.tensor)

    def _average(self, average: Average) -> None:
        flat = average.tensor
        cells, first, depth = self._cells[flat.dtype], self._pieces, RankProgress.depth
        pieces = flat.split(cells.shape[2])
        count = len(pieces) if flat.numel() else 0
        filling: dict[int, Any] = {}
        taking: dict[int, Any] = {}
        for step in range(count + 3):
            if 0 <= (k := step) < count:
                slot = cells[self._rank, (first + k) % depth, : len(pieces[k])]
                filling[k] = self._copies.copy(slot, pieces[k], average.after)
            if 0 <= (k := step - 1) < count:
                self._copies.finish(filling.pop(k))
                self._progress.mark(Stage.filled, first + k + 1, _tensor_key(flat))
                self._wait(Stage.filled, first + k + 1)
                if k == 0:
                    self._require_same(flat)
                self._sum(cells[:, (first + k) % depth, : len(pieces[k])])
                self._progress.mark(Stage.summed, first + k + 1)
            if 0 <= (k := step - 2) < count:
                self._wait(Stage.summed, first + k + 1)
                result = cells[self._ranks, (first + k) % depth, : len(pieces[k])]
                taking[k] = self._copies.copy(pieces[k], result, average.after)
            if 0 <= (k := step - 3) < count:
                self._copies.finish(taking.pop(k))
        self._pieces += count

    def _sum(self, cells: torch.Tensor) -> None:
        """Average this rank's share of a piece, [ranks + 1, elements], into the last row."""
        each = -(-cells.shape[1] // (self._ranks * _ALIGNMENT)) * _ALIGNMENT
        *parts, result = cells[:, self._rank * each : (self._rank + 1) * each]
        if SUMMED_IN[result.dtype] is not result.dtype:
            total, part = self._sums[:, : len(result)]
            total.copy_(parts[0])
            for other in parts[1:]:
                total.add_(part.copy_(other))
            result.copy_(total.div_(self._ranks))
        elif self._ranks == 1:
            result.copy_(parts[0])
        else:
            torch.add(parts[0], parts[1], out=result)
            for other in parts[2:]:
                result.add_(other)
            result.div_(self._ranks)

    def _require_same(self, flat: torch.Tensor) -> None:
        for rank in range(self._ranks):
            what = self._progress.what(rank, self._pieces)
            if what != _tensor_key(flat):
                raise DistributedError(
                    f"rank {self._names[rank]} brought {what >> 8} elements of {_DTYPES[what & 255]}, and "
                    f"rank {self._names[self._rank]} {flat.numel()} of {flat.dtype}: all ranks must have the "
                    "same model, and its buckets in the same order"
                )

    def _wait(self, stage: Stage, pieces: int) -> None:
        begun_s = time.perf_counter()
        rank, why = self._progress.wait(stage, pieces, self._timeout_s)
        if rank >= 0:
            waited = format_seconds(time.perf_counter() - begun_s)
            raise DistributedError(
                f"rank {self._names[self._rank]} waited {waited} for the gradients of rank "
                f"{self._names[rank]}, process {self._segment.pids[rank]}: "
                + _WHY[why].format(limit=format_seconds(self._timeout_s))
            )


def _tensor_key(flat: torch.Tensor) -> int:
    return flat.numel() << 8 | _DTYPES.index(flat.dtype)


def _mean_s(action: Callable[[], None]) -> float:
    """Mean time of an action, repeated for long enough that ranks which share a core take turns."""
    action()
    begun_s, count = time.perf_counter(), 0
    while (passed_s := time.perf_counter() - begun_s) < _RATES_S:
        action()
        count += 1
    return passed_s / count


def _stop(
    process: int,
    progress: RankProgress,
    tensors: queue.SimpleQueue[Average | None],
    thread: threading.Thread,
    segment: SharedSegment,
    copies: GradientCopies,
    memory: torch.Tensor,
) -> None:
    if os.getpid() != process:
        return  # a forked child is no rank
    progress.fail()
    tensors.put(None)
    if thread is not threading.current_thread():
        thread.join(_CLOSE_S)
    copies.unlock(memory.data_ptr())
    segment.close()


def _serve(reference: weakref.ref[Exchange], tensors: queue.SimpleQueue[Average | None]) -> None:
    while (average := tensors.get()) is not None:
        exchange = reference()
        if exchange is None:
            return
        exchange._run(average)
        del exchange, average
