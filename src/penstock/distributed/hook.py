"""A communication hook of DistributedDataParallel: gradients are averaged in host memory (moDNN 6.2)."""

# Annotations are objects here: DistributedDataParallel looks at those of its hooks.
import itertools
import logging
import math
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from penstock.distributed.exchange import Exchange
from penstock.distributed.segment import NotOneMachine
from penstock.errors import InvalidArgument
from penstock.runtime.devices.cuda import TorchDriver
from penstock.runtime.devices.drivers import DRIVERS
from penstock.storage.files import Closing
from penstock.units import format_bytes, format_seconds, parse_bytes

logger = logging.getLogger("penstock")

METHODS = ("host", "all_reduce", "auto")
# Of DistributedDataParallel: its first bucket, and bucket_cap_mb.
BUCKETS = ("1MiB", "25MiB")
_ROUNDS = 3

# An operator, so that what follows the operators of a thread sees a collective: a run of penstock.offload
# then keeps the bucket on the device until the exchange is done.
_library = torch.library.Library("penstock", "DEF")
_library.define("host_average_(Tensor(a!) bucket, int exchange) -> __torch__.torch.classes.c10d.Work")
_exchanges: weakref.WeakValueDictionary[int, Exchange] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _host_average(bucket: torch.Tensor, exchange: int) -> torch.ScriptObject:
    return _exchanges[exchange].submit(bucket).boxed()


_library.impl("host_average_", _host_average, "CompositeExplicitAutograd")


@dataclass(frozen=True, slots=True)
class Measured:
    """Both methods at one size: medians of the slowest rank, and what was predicted.

    size_bytes   of the bucket
    """

    size_bytes: int
    host_s: float
    all_reduce_s: float
    predicted_host_s: float
    predicted_all_reduce_s: float

    @property
    def faster(self) -> str:
        return "host" if self.host_s < self.all_reduce_s else "all_reduce"

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.size_bytes)} take {format_seconds(self.host_s)} in host memory (predicted "
            f"{format_seconds(self.predicted_host_s)}) and {format_seconds(self.all_reduce_s)} by all-reduce "
            f"(predicted {format_seconds(self.predicted_all_reduce_s)})"
        )


class HostAccumulation(Closing):
    """State of `host_accumulation_hook`. All ranks of the process group make it, with the same arguments.

    process_group   the model's; None: the default group. Its ranks have to be on one machine
    method          "host": accumulate in host memory. "all_reduce": the process group's own. "auto": measure
                    both now, and take the faster for each bucket, the same on all ranks
    device          of the gradients; None: the accelerator, or the CPU where there is none
    bucket_sizes    at which "auto" measures: those of `bucket_cap_mb`. A bucket goes the way that is faster
                    at the size nearest to it
    timeout         longest wait for another rank; None: the process group's

    method     "host" or "all_reduce"; "auto" where it depends on the bucket
    measured   what "auto" found
    reason     why, in one sentence

    Raises InvalidArgument, InvalidSize, DistributedError.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        method: str = "host",
        device: str | torch.device | None = None,
        bucket_sizes: Sequence[int | str] = BUCKETS,
        timeout: timedelta | None = None,
    ) -> None:
        if method not in METHODS:
            raise InvalidArgument(f"there is no method {method!r}: choose one of {', '.join(METHODS)}")
        if not dist.is_initialized():
            raise InvalidArgument("there is no process group: call init_process_group first")
        sizes = sorted({parse_bytes(size) for size in bucket_sizes})
        if method == "auto" and (not sizes or sizes[0] < 4):
            raise InvalidArgument(f"bucket_sizes {bucket_sizes!r} has no sizes to measure at: give some")
        self.process_group = process_group or dist.group.WORLD
        self.method, self.reason = method, "as given"
        self.measured: tuple[Measured, ...] = ()
        self._device = _device(device)
        self._exchange: Exchange | None = None
        if method == "all_reduce":
            return
        if timeout is None:
            timeout = self.process_group._get_backend(self._device).options._timeout
        try:
            on_host, kind = self._device.type == "cpu", DRIVERS.get(self._device.type, TorchDriver)
            driver = None if on_host else kind(self._device)
            self._exchange = Exchange(self.process_group, driver, timeout.total_seconds())
        except NotOneMachine as error:
            if method != "auto":
                raise
            self.method, self.reason = "all_reduce", str(error)
        else:
            self._number = next(_numbers)
            _exchanges[self._number] = self._exchange
            if method == "auto":
                self._choose_method(sizes)
        if method == "auto" and dist.get_rank(self.process_group) == 0:
            logger.info("gradients are averaged by %s: %s", self.method, self.reason)

    def method_of(self, size_bytes: int) -> str:
        """How a bucket of this size is averaged: "host" or "all_reduce"."""
        if self.method != "auto":
            return self.method
        nearest = min(self.measured, key=lambda row: abs(math.log(row.size_bytes / max(size_bytes, 1))))
        return nearest.faster

    def average(self, tensor: torch.Tensor) -> Future[torch.Tensor]:
        """Begin to replace a tensor by its mean over the ranks, through host memory. Its elements must be
        contiguous."""
        if tensor.device != self._device:
            raise InvalidArgument(
                f"the gradients are on {tensor.device}, and this HostAccumulation is for {self._device}: "
                f"make it with device={str(tensor.device)!r}"
            )
        if self._exchange is None:
            raise InvalidArgument(
                "this HostAccumulation was made for all-reduce only: make it with method='host'"
            )
        torch.ops.penstock.host_average_.default(tensor, self._number)
        return self._exchange.latest.future

    def close(self) -> None:
        """Free the shared memory. Ranks that still wait for this one get an error."""
        if self._exchange is not None:
            self._exchange.close()

    def _choose_method(self, sizes: Sequence[int]) -> None:
        assert self._exchange is not None
        ranks = dist.get_world_size(self.process_group)
        dist.barrier(self.process_group)
        bus_bytes_per_s, sum_bytes_per_s = self._all_reduced(
            self._exchange.rates(self._device), dist.ReduceOp.SUM
        )
        found = []
        for size_bytes in sizes:
            tensor = torch.ones(size_bytes // 4, device=self._device)
            times_s: tuple[list[float], list[float]] = ([], [])
            for _ in range(_ROUNDS + 1):
                for average, taken_s in zip((self._host_average, self._all_reduce), times_s, strict=True):
                    taken_s.append(self._timed(average, tensor))
            medians_s = [statistics.median(taken_s[1:]) for taken_s in times_s]
            # The same numbers on all ranks, and so the same choice.
            host_s, all_reduce_s = self._all_reduced(medians_s, dist.ReduceOp.MAX)
            predicted = predict_exchange(size_bytes, ranks, bus_bytes_per_s, sum_bytes_per_s)
            found.append(Measured(size_bytes, host_s, all_reduce_s, predicted.host_s, predicted.all_reduce_s))
        self.measured = tuple(found)
        fastest = {measured.faster for measured in found}
        if len(fastest) == 1:
            self.method = fastest.pop()
        self.reason = "; ".join(map(str, found))

    def _timed(self, average: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> float:
        dist.barrier(self.process_group)
        begun_s = time.perf_counter()
        average(tensor)
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter() - begun_s

    def _host_average(self, tensor: torch.Tensor) -> None:
        self.average(tensor).wait()

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor.div_(dist.get_world_size(self.process_group)), group=self.process_group)

    def _all_reduced(self, numbers: Sequence[float], operation: Any) -> list[float]:
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, operation, group=self.process_group)
        return list(tensor.tolist())


def host_accumulation_hook(state: HostAccumulation, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks, in host memory, while backward goes on.

    For ``model.register_comm_hook(state, host_accumulation_hook)``. Gradients of float32, float64, bfloat16
    and float16; the last two are added up in float32, and rounded once. Every rank gets the same bits, and
    the same ones each time.
    """
    buffer = bucket.buffer()
    if state.method_of(buffer.nbytes) == "all_reduce":
        return allreduce_hook(state.process_group, bucket)
    return state.average(buffer)


def _device(wanted: str | torch.device | None) -> torch.device:
    if wanted is None:
        wanted = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    device = torch.device(wanted)
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


class ExchangeTime(NamedTuple):
    """Seconds, for one bucket by itself.

    host_s         gradients to the host, their sum there, and the mean back (moDNN 6.2)
    all_reduce_s   a ring all-reduce between the devices
    """

    host_s: float
    all_reduce_s: float


def predict_exchange(
    size_bytes: int, ranks: int, bus_bytes_per_s: float, sum_bytes_per_s: float
) -> ExchangeTime:
    """Predict both from what crosses the bus, and what the host's memory has to bring.

    size_bytes        of the bucket, on each rank
    bus_bytes_per_s   of all devices together
    sum_bytes_per_s   of gradients that the host reads to add them up, all ranks together

    Host accumulation moves ``size_bytes`` to the host and back on each rank, 2 `cudaMemcpy` each (moDNN 6.2,
    "2M cudaMemcpy calls"), and reads the gradients of all ranks once. A ring moves 2 (ranks - 1) / ranks of
    the bucket from each rank to the next: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms",
    2009. What goes from one device to another crosses the bus twice: to the host and from there (moDNN 6.1).
    The ring's sums, on the devices, count for nothing, and so do latencies: it has 2 (ranks - 1) of them.
    """
    return ExchangeTime(
        host_s=2 * ranks * size_bytes / bus_bytes_per_s + ranks * size_bytes / sum_bytes_per_s,
        all_reduce_s=2 * 2 * (ranks - 1) * size_bytes / bus_bytes_per_s,
    )
