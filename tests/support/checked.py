"""A checked accelerator: a driver over CPU tensors that finds races, for penstock's accelerator device.

Streams and events are vector clocks. A kernel is carried out when it is launched. A copy moves its bytes at a
random later moment: no earlier than it was issued, no later than something waits for it. Every kernel, copy,
allocation and release is checked:

- for a missing happens-before between accesses to the same memory;
- for memory that is handed out again while something may still use it;
- for a read of bytes that are away, that have not come back, or that were copied while they were written;
- for more memory than the budget.

A violation raises, and names both accesses; those on other threads are kept for `check`. The threads of the
host count as one: what one of them has seen, all know.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.capture.operators import describe, tensors_in, written_tensors
from penstock.runtime.copy_engine import CopyEngine
from penstock.runtime.devices import packing
from penstock.runtime.devices.accelerator import AcceleratorDevice
from penstock.runtime.devices.driver import Memory
from penstock.runtime.offload_mode import OffloadMode
from penstock.runtime.storage_methods import held_bytes, resize
from penstock.runtime.storages import ManagedStorage
from penstock.storage.spill import SpillSpace

Times = dict[str, int]  # a vector clock: by stream, how many of its operations have happened


class Violation(Exception):
    """The program raced, or broke its budget."""


class Access(NamedTuple):
    """An operation that used some memory: the `tick`-th of its stream."""

    text: str
    stream: str
    tick: int
    copy: PendingCopy | None = None

    def happened_before(self, times: Times) -> bool:
        return times.get(self.stream, 0) >= self.tick


class Region:
    """Memory that is handed out, and who used it.

    owner    stream whose later operations may be given this memory again
    taken    what had happened on that stream when the memory was handed out
    filled   something was written to it
    copies   to the host since it was written last, by the offset at which they begin
    recorded  streams that may still use it when it is freed: `record_stream`
    """

    def __init__(self, name: str, size_bytes: int, owner: CheckedStream | None, taken: Times) -> None:
        self.name, self.size_bytes, self.owner, self.taken = name, size_bytes, owner, taken
        self.write: Access | None = None
        self.reads: list[Access] = []
        self.filled = False
        self.copies: dict[int, PendingCopy] = {}
        self.recorded: set[str] = set()


class PendingCopy:
    """A copy between device and host. torn: what wrote to its source without waiting for it."""

    def __init__(self, text: str, move: Callable[[], None]) -> None:
        self.text, self.move = text, move
        self.torn: str | None = None


class CheckedStream:
    def __init__(self, driver: CheckedDriver, name: str) -> None:
        self.name = name
        self.times: Times = {}
        self.pending: deque[PendingCopy | tuple[CheckedStream, int]] = deque()  # copies, and waits
        self.issued = self.executed = 0
        self._driver = driver

    def wait_event(self, event: CheckedEvent) -> None:
        with self._driver.at_random():
            if event.after is not None:
                self.pending.append(event.after)
                self.issued += 1
                _join(self.times, event.times)

    def synchronize(self) -> None:
        with self._driver.at_random():
            self.execute(self.issued)
            _join(self._driver.host, self.times)

    def execute(self, upto: int) -> None:
        while self.executed < upto:
            operation = self.pending.popleft()
            self.executed += 1
            if isinstance(operation, PendingCopy):
                operation.move()
            else:
                operation[0].execute(operation[1])

    def __repr__(self) -> str:
        return self.name


class CheckedEvent:
    def __init__(self, driver: CheckedDriver) -> None:
        self._driver = driver
        self.times: Times = {}
        self.after: tuple[CheckedStream, int] | None = None
        self._recorded_s = 0.0

    def record(self, stream: CheckedStream) -> None:
        with self._driver.at_random():
            self.times = _joined(stream.times, self._driver.host)
            self.after = stream, stream.issued
            self._recorded_s = self._driver.device_s

    def query(self) -> bool:
        with self._driver.at_random():
            if self.after is not None and self.after[0].executed < self.after[1]:
                return False
            _join(self._driver.host, self.times)
            return True

    def elapsed_time(self, later: CheckedEvent) -> float:
        return (later._recorded_s - self._recorded_s) * 1e3

    def synchronize(self) -> None:
        with self._driver.at_random():
            after, times = self.after, dict(self.times)
            if after is None:
                return
            after[0].execute(after[1])
        self._driver.dawdle()
        with self._driver.lock:
            _join(self._driver.host, times)


class CheckedDriver:
    """See penstock.runtime.devices.driver.Driver.

    random           decides when copies are carried out
    refuses          memory beyond the budget is refused, as an allocator does; else taking it is a violation
    mode             sees every kernel: enter it before the clock
    violations       so far
    kernel_bytes     most that one kernel used and made
    refused          how often memory was refused
    marks            what a profiler would have been told
    kernel_s         that a kernel takes on the device, and `device_s` all so far, by the clock of its events
    """

    memory_manager = "checked"
    name = "checked accelerator"
    total_bytes = free_bytes = 1 << 40
    kernel_s = device_s = 0.0

    def __init__(self, seed: int = 0, *, refuses: bool = False, lag: float = 0.3) -> None:
        self.device = torch.device("cpu")
        self.random = random.Random(seed)
        self.refuses = refuses
        self.lag = lag
        self.lock = threading.RLock()
        self.host: Times = {}
        self.violations: list[Violation] = []
        self.access_errors: dict[int, str] = {}
        self.dropped: set[int] = set()  # storages that are emptied on purpose
        self.kernel_bytes = self.refused = 0
        self.marks: list[str] = []
        self._streams: list[CheckedStream] = []
        self._compute = self.make_stream("compute")
        self._local = threading.local()
        self._regions: dict[int, Region] = {}  # by storage
        self._references: dict[int, Any] = {}
        self._host_regions: dict[int, Region] = {}  # by address
        self._slabs: dict[int, int] = {}
        self._allocated_bytes = self._peak_bytes = 0
        self._limit_bytes: int | None = None
        self._names = 0
        self.mode = _Kernels(self)

    # -- the protocol ------------------------------------------------------------------------------

    def make_stream(self, name: str = "") -> CheckedStream:
        stream = CheckedStream(self, name or f"stream {len(self._streams)}")
        self._streams.append(stream)
        return stream

    def make_event(self, timed: bool = False) -> CheckedEvent:
        return CheckedEvent(self)

    def current_stream(self) -> CheckedStream:
        return getattr(self._local, "stream", self._compute)

    @contextlib.contextmanager
    def on(self, stream: CheckedStream) -> Iterator[None]:
        """Kernels of this thread go to another stream."""
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: CheckedStream) -> None:
        into = self._is_host(source)
        device, host = (target, source) if into else (source, target)
        storage, size_bytes = device.untyped_storage(), device.numel()
        with self.at_random():
            region = self._region(storage)
            text = f"the copy {'to' if into else 'from'} {region.name} on {stream}"
            copy = PendingCopy(text, self._mover(region, storage, device.storage_offset(), host, into, text))
            access, times = self._launch(stream, text, copy)
            staged = self._host_region(_address(host), size_bytes)
            if into:
                self._read(staged, access, times)
                self._write(region, access, times)
            else:
                self._copy_out(region, access, times)
                region.copies[device.storage_offset()] = copy
                self._write(staged, access, times)
            stream.pending.append(copy)
            stream.issued += 1

    def allocate(self, size_bytes: int, stream: CheckedStream) -> torch.UntypedStorage | None:
        with self.at_random():
            if self.refuses and self._is_too_much(size_bytes):
                self.refused += 1
                return None
            storage = torch.UntypedStorage(size_bytes)
            self._add(storage, stream)
            self._allocate(size_bytes, "what is fetched packed")
            return storage

    def reserve(self, size_bytes: int, stream: CheckedStream) -> int | None:
        return None  # there are no segments

    def undivided(self, size_bytes: int) -> str | None:
        return None

    def pack(
        self,
        content: torch.Tensor,
        codec: str,
        itemsize: int,
        admits: Callable[[int], bool],
        stream: CheckedStream,
    ) -> torch.Tensor | None:
        with self.at_random():
            region = self._region(content.untyped_storage())
            text = f"the packing of {region.name} on {stream}"
            copy = PendingCopy(text, lambda: None)
            access, times = self._launch(stream, text, copy)
            self._copy_out(region, access, times)
            stream.pending.append(copy)
            stream.issued += 1
        packed = packing.pack(content, codec, itemsize, admits)
        if packed is not None:
            with self.lock:
                region.copies[0] = copy
                made = self._add(packed.untyped_storage(), stream)
                made.write, made.filled = access, True
                self._allocate(packed.numel(), text)
        return packed

    def unpack(
        self,
        packed: torch.Tensor,
        content: torch.Tensor,
        codec: str,
        itemsize: int,
        stream: CheckedStream,
    ) -> bool:
        with self.at_random():
            region = self._region(content.untyped_storage())
            text = f"the expansion of {region.name} on {stream}"
            copy = PendingCopy(text, lambda: None)
            access, times = self._launch(stream, text, copy)
            self._read(self._region(packed.untyped_storage()), access, times)
            self._write(region, access, times)
            stream.pending.append(copy)
            stream.issued += 1
            return packing.unpack(packed, content, codec, itemsize)

    def resize(self, storage: torch.UntypedStorage, size_bytes: int, stream: CheckedStream) -> bool:
        with self.at_random():
            region = self._region(storage)
            if size_bytes == 0:
                stream.execute(stream.issued)  # as for a kernel: it is empty now
                if storage._cdata in self.dropped:
                    self.dropped.discard(storage._cdata)
                else:
                    self._check_copied(region)
                self._free(region, "emptied")
                resize(storage, 0)
                region.size_bytes = 0
                return True
            if held_bytes(storage):
                self._violate(f"{region.name} is filled, and was never emptied")
            if storage._cdata in self.access_errors:
                self._violate(f"{region.name} is filled while accesses to it raise")
            if self.refuses and self._is_too_much(size_bytes):
                self.refused += 1
                return False
            resize(storage, size_bytes)
            ctypes.memset(storage.data_ptr(), self.random.randrange(256), size_bytes)
            region.size_bytes, region.owner = size_bytes, stream
            region.taken = _joined(stream.times, self.host)
            region.write, region.reads, region.filled = None, [], False
            self._allocate(size_bytes, f"bringing {region.name} back")
            return True

    def name_stream(self, stream: CheckedStream) -> torch.Stream:
        """What operators of torch take for it."""
        return torch.Stream(stream_id=self._streams.index(stream), device_index=0, device_type=1)

    def record_stream(self, storage: torch.UntypedStorage, stream: CheckedStream | torch.Stream) -> None:
        with self.at_random():
            if isinstance(stream, torch.Stream):
                stream = self._streams[stream.stream_id]
            self._region(storage).recorded.add(stream.name)

    def set_access_error(self, storage: torch.UntypedStorage, text: str | None) -> None:
        if text is None:
            self.access_errors.pop(storage._cdata, None)
        else:
            self.access_errors[storage._cdata] = text

    def page_lock(self, address: int, size_bytes: int) -> bool:
        self._slabs[address] = size_bytes
        return True

    def page_unlock(self, address: int) -> None:
        del self._slabs[address]

    def allocated_bytes(self) -> int:
        return self._allocated_bytes

    def memory(self) -> Memory:
        return Memory(self._allocated_bytes, self._allocated_bytes, self._peak_bytes, self._peak_bytes)

    def reset_peaks(self) -> None:
        self._peak_bytes = self._allocated_bytes

    def empty_cache(self) -> None:
        pass

    def limit(self, reserved_bytes: int | None) -> None:
        self._limit_bytes = reserved_bytes

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError)

    def synchronize(self) -> None:
        for stream in list(self._streams):
            stream.synchronize()

    @contextlib.contextmanager
    def profiler_range(self, text: str) -> Iterator[None]:
        self.marks.append(text)
        yield

    # -- randomness --------------------------------------------------------------------------------

    def use_device(self) -> None:
        self._local.uses_device = True

    @contextlib.contextmanager
    def at_random(self) -> Iterator[None]:
        """With the lock held, after some copies were carried out that may be."""
        name = threading.current_thread().name
        if name.startswith(("penstock", "Dummy")) and not getattr(self._local, "uses_device", False):
            self._violate(f"{name} has another device as its current one")
        with self.lock:
            if self.random.random() < self.lag:
                stream = self.random.choice(self._streams)
                stream.execute(self.random.randint(stream.executed, stream.issued))
            yield

    def dawdle(self) -> None:
        """Go on a little later: copies may be over, or begin, meanwhile."""
        with self.lock:
            late, delay_s = self.random.random() < self.lag / 3, self.random.random() * 2e-3
        if late:
            time.sleep(delay_s)

    # -- checks ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the first violation of any thread."""
        with self.lock:
            if self.violations:
                raise self.violations[0]

    def _violate(self, text: str) -> None:
        violation = Violation(text)
        self.violations.append(violation)
        raise violation

    def _launch(
        self, stream: CheckedStream, text: str, copy: PendingCopy | None = None
    ) -> tuple[Access, Times]:
        _join(stream.times, self.host)
        tick = stream.times[stream.name] = stream.times.get(stream.name, 0) + 1
        return Access(text, stream.name, tick, copy), stream.times

    def _read(self, region: Region, access: Access, times: Times) -> None:
        self._check_taken(region, access, times)
        if not region.filled:
            self._violate(f"{access.text} reads {region.name}, whose bytes are not there")
        if region.write is not None and not region.write.happened_before(times):
            self._violate(f"{access.text} reads {region.name}, and does not wait for {region.write.text}")
        region.reads.append(access)

    def _copy_out(self, region: Region, access: Access, times: Times) -> None:
        """As `_read`; what is read while it is written is of no harm unless somebody uses the copy."""
        if region.write is not None and region.filled and not region.write.happened_before(times):
            assert access.copy is not None
            access.copy.torn = region.write.text
            region.reads.append(access)
        else:
            self._read(region, access, times)

    def _check_copied(self, region: Region) -> None:
        """It is to be emptied: what was written to it must have been copied."""
        if region.write is None or region.write.copy is not None:
            return
        if not region.copies:
            self._violate(f"{region.name} is emptied, and nothing has copied what {region.write.text} wrote")
        for copy in region.copies.values():
            if copy.torn is not None:
                self._violate(f"{region.name} is emptied, and {copy.text} did not wait for {copy.torn}")

    def _write(self, region: Region, access: Access, times: Times) -> None:
        self._check_taken(region, access, times)
        for other in (region.write, *region.reads):
            if other is None or other.happened_before(times):
                continue
            if other.copy is not None and other is not region.write and access.copy is None:
                other.copy.torn = access.text  # of no harm unless somebody uses the copy
            else:
                self._violate(f"{access.text} writes to {region.name}, and does not wait for {other.text}")
        region.write, region.reads, region.filled = access, [], True
        region.copies = {}

    def _check_taken(self, region: Region, access: Access, times: Times) -> None:
        for stream, tick in region.taken.items():
            if times.get(stream, 0) < tick:
                self._violate(
                    f"{access.text} uses the memory of {region.name}, and does not wait for those who had it "
                    f"before on {stream}"
                )

    def _free(self, region: Region, how: str) -> None:
        """Its memory may be handed out again to the stream that owns it."""
        owner = region.owner
        times = _joined(owner.times if owner is not None else {}, self.host)
        for stream in self._streams:
            if stream.name in region.recorded:
                _join(times, stream.times)
        for other in (region.write, *region.reads):
            if other is None or other.stream in region.recorded:
                continue
            if not other.happened_before(times):
                self._violate(f"{region.name} is {how} while {other.text} may still use it")
        region.write, region.reads, region.filled = None, [], False
        region.recorded.clear()
        self._allocated_bytes -= region.size_bytes

    def _is_too_much(self, size_bytes: int) -> bool:
        return self._limit_bytes is not None and self._allocated_bytes + size_bytes > self._limit_bytes

    def _allocate(self, size_bytes: int, what: str) -> None:
        too_much = self._is_too_much(size_bytes)
        self._allocated_bytes += size_bytes
        self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)
        if too_much:
            self._violate(
                f"{what} takes {size_bytes} bytes: {self._allocated_bytes} are in use then, and "
                f"{self._limit_bytes} allowed"
            )

    # -- memory ------------------------------------------------------------------------------------

    def _region(self, storage: torch.UntypedStorage) -> Region:
        key = storage._cdata
        region = self._regions.get(key)
        if region is None:  # made where no kernel was seen, on the host
            region = self._add(storage, None)
            region.filled = True
            self._allocate(region.size_bytes, f"{region.name}, which the program made,")
        return region

    def _add(self, storage: torch.UntypedStorage, owner: CheckedStream | None) -> Region:
        self._names += 1
        taken = _joined(owner.times, self.host) if owner is not None else {}
        region = Region(f"storage {self._names}", held_bytes(storage), owner, taken)
        key = storage._cdata
        self._regions[key] = region

        def died(_: Any) -> None:
            with self.lock:
                if self._regions.get(key) is region:
                    del self._regions[key], self._references[key]
                    self.access_errors.pop(key, None)
                with contextlib.suppress(Violation):  # it is kept: raised here, it would be lost
                    self._free(region, "freed")

        self._references[key] = weakref.ref(storage, died)
        return region

    def _is_host(self, tensor: torch.Tensor) -> bool:
        address = _address(tensor)
        return any(begin <= address < begin + size for begin, size in self._slabs.items())

    def _host_region(self, address: int, size_bytes: int) -> Region:
        region = self._host_regions.get(address)
        if region is not None and region.size_bytes == size_bytes:
            return region
        for begin, other in list(self._host_regions.items()):
            if begin < address + size_bytes and address < begin + other.size_bytes:
                for access in (other.write, *other.reads):
                    if access is not None and not access.happened_before(self.host):
                        self._violate(f"host memory is used again while {access.text} may still use it")
                del self._host_regions[begin]
        region = self._host_regions[address] = Region(f"host memory {address:x}", size_bytes, None, {})
        region.filled = True  # by the disk, as far as is known
        return region

    def _mover(
        self,
        region: Region,
        storage: torch.UntypedStorage,
        offset: int,
        host: torch.Tensor,
        into: bool,
        text: str,
    ) -> Callable[[], None]:
        reference, size_bytes, address = weakref.ref(storage), host.numel(), _address(host)
        whole = held_bytes(storage)

        def move() -> None:
            storage = reference()
            if storage is None:  # dead: `_free` has checked that its memory is handed out behind this copy
                if not into:  # nobody may want the bytes
                    ctypes.memset(address, self.random.randrange(256), size_bytes)
                return
            if held_bytes(storage) != whole:
                self._violate(f"{text} runs after its memory was given back")
                return
            pointers = storage.data_ptr() + offset, address
            ctypes.memmove(*(pointers if into else pointers[::-1]), size_bytes)

        return move

    # -- kernels -----------------------------------------------------------------------------------

    def kernel(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        facts = describe(operator)
        if facts.name == "record_stream":
            self.record_stream(args[0].untyped_storage(), args[1])
            return None
        if not facts.is_kernel:
            return operator(*args, **kwargs)
        stream = self.current_stream()
        self.dawdle()
        with self.at_random():
            access, times = self._launch(stream, f"kernel {facts.name} {self._launched(stream)} on {stream}")
            written = {tensor.untyped_storage()._cdata for tensor in written_tensors(facts, args, kwargs)}
            used = {
                tensor.untyped_storage()._cdata: tensor.untyped_storage()
                for tensor in tensors_in((args, kwargs))
                if not facts.reads_shapes
            }
            used_bytes = 0
            for key, storage in used.items():
                region = self._region(storage)
                used_bytes += region.size_bytes
                if held_bytes(storage) != region.size_bytes:
                    self._violate(f"{region.name} has changed its size unseen")
                if region.size_bytes or key in self.access_errors:
                    if key in written:
                        self._check_taken(region, access, times)
                        self._write(region, access, times)
                    else:
                        self._read(region, access, times)
            self.device_s += self.kernel_s
            before = {key: held_bytes(storage) for key, storage in used.items()}
            stream.execute(stream.issued)  # the kernel runs now, and so does what its stream waits for
        result = operator(*args, **kwargs)
        with self.lock:
            made_bytes = 0
            for key, storage in used.items():
                if (grown := held_bytes(storage) - before[key]) != 0:  # such as resize_
                    self._regions[key].size_bytes += grown
                    made_bytes += grown
            made = {
                tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors_in(result)
            }
            made = {key: storage for key, storage in made.items() if key not in self._regions}
            made_bytes += sum(held_bytes(storage) for storage in made.values())
            self.kernel_bytes = max(self.kernel_bytes, used_bytes + made_bytes)
            if self.refuses and made_bytes and self._is_too_much(made_bytes):
                self.refused += 1
                del result, made
                raise torch.OutOfMemoryError(f"{operator} tried to allocate {made_bytes} bytes")
            for storage in made.values():
                region = self._add(storage, stream)
                region.write, region.filled = access, True
                region.copies = {}
            self._allocate(made_bytes, access.text)
        return result

    @staticmethod
    def _launched(stream: CheckedStream) -> int:
        return stream.times.get(stream.name, 0) + 1


class _Kernels(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, driver: CheckedDriver) -> None:
        super().__init__()
        self._driver = driver

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._driver.kernel(operator, args, kwargs or {})


class CheckedRun(NamedTuple):
    clock: OffloadMode
    engine: CopyEngine
    device: AcceleratorDevice
    driver: CheckedDriver


@contextlib.contextmanager
def checked_run(
    spill: SpillSpace,
    budget_bytes: int,
    *,
    seed: int = 0,
    host_bytes: int = 1 << 16,
    refuses: bool = False,
    smallest_bytes: int = 1,
    timeout_s: float = 30.0,
    in_flight_bytes: int = 8192,
    variants: bool = False,
    make_device: Callable[..., AcceleratorDevice] = AcceleratorDevice,
    make_driver: Callable[..., CheckedDriver] = CheckedDriver,
) -> Iterator[CheckedRun]:
    """Everything inside runs on a checked accelerator, inside the budget. Raises the first violation."""
    driver = make_driver(seed, refuses=refuses)
    staging_bytes = 2 * 3 * 4096
    device = make_device(spill, driver, budget_bytes, staging_bytes + host_bytes, chunk_bytes=4096, chunks=3)
    engine = CopyEngine(device, budget_bytes, timeout_s=timeout_s, in_flight_bytes=in_flight_bytes)
    device.engine = engine
    drop = device.drop

    def told_drop(managed: ManagedStorage, storage: torch.UntypedStorage) -> bool:
        driver.dropped.add(storage._cdata)
        return drop(managed, storage)

    device.drop = told_drop  # type: ignore[method-assign]
    clock = OffloadMode(device, engine, smallest_bytes, variants=variants)
    with driver.mode:
        clock.start()
        try:
            yield CheckedRun(clock, engine, device, driver)
        finally:
            clock.stop()
            try:
                clock.recomputation.recompute_all()
                engine.drain()
                with engine.lock:
                    clock.storages.remove_dead()
                    device.bring_all_back(clock.storages.all())
                device.close()
            finally:
                driver.check()  # what a violation has led to is of less interest


def _address(tensor: torch.Tensor) -> int:
    """As torch has it: no run brings the tensor back."""
    return torch._C.TensorBase.data_ptr(tensor)


def _join(times: Times, other: Times) -> None:
    for stream, tick in other.items():
        if tick > times.get(stream, 0):
            times[stream] = tick


def _joined(times: Times, other: Times) -> Times:
    joined = dict(times)
    _join(joined, other)
    return joined
