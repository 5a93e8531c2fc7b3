"""A device that behaves like a GPU, on the CPU: `torch.device("emu")`, for tests.

- Memory: tensors carry addresses that the host cannot touch, and an access ends the process. New memory is
  full of NaN, and memory that was given back of other nonsense, each in the order of the stream that owns it.
  The allocator has the policy of CUDA's, and a hard limit.
- Work is launched to streams, and carried out by one thread that never takes the GIL, in an order that
  `configure` names. What forgets to wait gets wrong bits, in some of them in every run.
- Kernels are the CPU's, so results have the CPU's bits where both run the same operators. Attention takes the
  math path, and fused cells and dropout are written out: compare with a plain run on the same device.
- Virtual time says how long it would take on a GPU: `configure(machine="h100-pcie5")`, then `reset_report`
  and `report`. It changes nothing that is computed.

What virtual time is: kernels take the time of a roofline (bytes of inputs and outputs, operations of
products and convolutions, and a least time), copies between host and device that of their link, one at a
time each way, launches that of the host, and transfers by the I/O path of emu/disk.py that of the disk.
Work begins when its stream is free, its launch over, what its stream waits for reached, and its link free:
found at launch, so the order in which it is really carried out does not matter. Events, and `elapsed_time`,
are in it. What it does not have: kernels that slow each other down (those of several streams overlap at
full speed), what Python and the program do between launches, events and waits that cost the host something.
Threads of the host have clocks, and a helper thread that waits for an event goes on when the program's
clock is there (native/virtual.h). Where threads meet at a lock, the order on the real machine decides: what
a program with helpers takes may differ a little from run to run.

Importing it compiles it, where that is not done yet, and changes torch for the whole process: it is the
accelerator then. There is one device, one executor, no graphs and no torch.compile.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import types
from typing import Any

import torch

from .build import library
from .machines import MACHINES, Machine
from .virtual import Link, Report, Span, VirtualTime, Wait

__all__ = [
    "MACHINES",
    "ORDERS",
    "Link",
    "Machine",
    "Report",
    "Span",
    "Wait",
    "begin_transfer",
    "computes",
    "configure",
    "counters",
    "high_water_bytes",
    "now_s",
    "page_lock",
    "page_unlock",
    "report",
    "reset_high_water",
    "reset_report",
    "spans",
    "wait_until",
]

# As `Order` in native/streams.h, where each is described.
ORDERS = ("eager", "lazy", "stepped", "random", "newest")
_COUNTERS = ("launched", "executed", "switches", "synchronized", "events")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

torch.utils.rename_privateuse1_backend("emu")
torch.ops.load_library(str(_path := library()))
_native = ctypes.CDLL(str(_path))
for _function in (_native.emu_total_bytes, _native.emu_high_water_bytes, _native.emu_alias_of):
    _function.restype = ctypes.c_uint64
_native.emu_counter.restype = ctypes.c_int64
_native.emu_configure.restype = _native.emu_page_unlock.restype = ctypes.c_char_p
_virtual = VirtualTime(_native)
_computes = True


def configure(
    memory: int | str = "4GiB",
    order: str = "random",
    seed: int = 0,
    host_delay_us: int = 0,
    machine: Machine | str | None = None,
    computes: bool = True,
) -> None:
    """What device it is, from now on. What was launched before is carried out first.

    memory          bytes, or a text such as "512MiB". Raises RuntimeError where more is in use
    order           in which work is carried out, one of ORDERS
    seed            of what the order draws
    host_delay_us   threads of the host sleep for up to so long, now and then, before they launch
    machine         of virtual time, which begins at 0: one, or a key of MACHINES. None: there is none
    computes        False: kernels and copies are launched and do nothing, and no memory is touched, so models
                    may be larger than the host's memory. Results are zeros, or nonsense
    """
    size_bytes = _bytes(memory)
    if isinstance(machine, str):
        if machine not in MACHINES:
            raise ValueError(f"there is no machine {machine!r}: choose one of {', '.join(MACHINES)}")
        machine = MACHINES[machine]
    if order not in ORDERS:
        raise ValueError(f"there is no order {order!r}: choose one of {', '.join(ORDERS)}")
    refused = _native.emu_configure(
        ctypes.c_uint64(size_bytes), ORDERS.index(order), ctypes.c_uint64(seed), host_delay_us, int(computes)
    )
    if refused is not None:
        raise RuntimeError(refused.decode())
    global _computes
    _computes = computes
    torch.get_device_module("emu").set_per_process_memory_fraction(1.0)
    _virtual.configure(machine)


def computes() -> bool:
    """As `configure` has it."""
    return _computes


def now_s() -> float:
    """This thread's clock, in virtual time."""
    return _virtual.now_s()


def begin_transfer(kind: str, size_bytes: int) -> Any:
    """This thread asks the disk for a transfer, of the kind "disk_read" or "disk_write". Returns its end, for
    `wait_until`, on any thread."""
    return _virtual.begin_transfer(kind, size_bytes)


def wait_until(end: Any) -> None:
    """Let this thread go on at the end of a transfer."""
    _virtual.wait_until(end)


def reset_report() -> None:
    """The next report is of what happens from now on. Synchronise before: what was launched before does not
    count."""
    _virtual.reset()


def report() -> Report:
    """Of virtual time since `reset_report`, or `configure`. Raises RuntimeError where there is no machine."""
    return _virtual.report()


def spans() -> list[Span]:
    """Items of work since then, as they were launched."""
    return _virtual.spans()


def counters() -> dict[str, int]:
    """Of the whole process: work launched and executed, changes of stream, waits of the host, and events that
    are there."""
    return {name: _native.emu_counter(which) for which, name in enumerate(_COUNTERS)}


def reset_high_water() -> None:
    """As `configure` does. No driver has this: a run resets the peaks of torch's statistics."""
    _native.emu_reset_high_water()


def high_water_bytes() -> int:
    """Most bytes that were reserved at once since then."""
    return int(_native.emu_high_water_bytes())


def alias_of(address: int) -> int:
    """Where a disk that reads and writes the device's memory by itself finds what lies at the address."""
    return int(_native.emu_alias_of(ctypes.c_uint64(address)))


def page_lock(address: int, size_bytes: int) -> None:
    """As cudaHostRegister: copies that do not block read and write this memory when they are carried out."""
    _native.emu_page_lock(ctypes.c_uint64(address), ctypes.c_uint64(size_bytes))


def page_unlock(address: int) -> None:
    """As cudaHostUnregister: waits for the device first."""
    if (raised := _native.emu_page_unlock(ctypes.c_uint64(address))) is not None:
        raise RuntimeError(raised.decode())


def _bytes(memory: int | str) -> int:
    if isinstance(memory, int):
        return memory
    number, unit = memory[:-3], memory[-3:]
    if unit not in _UNITS or not number.isdigit():
        raise ValueError(f"{memory!r} is no size: give bytes, or a text such as '512MiB'")
    return int(number) * _UNITS[unit]


class _Module(types.ModuleType):
    """torch.emu: what torch and others look for in torch.cuda."""

    # Without it, torch.utils.checkpoint takes random states of this device for none.
    _initialized = True
    Event = torch.Event

    def __init__(self) -> None:
        super().__init__("torch.emu")
        self.default_generators = (torch.Generator(device="emu"),)
        torch.ops.emu.set_default_generator(self.default_generators[0])

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _lazy_init(self) -> None:
        """torch 2.11 waits for no device whose module has no such function."""

    def _is_in_bad_fork(self) -> bool:
        return bool(_native.emu_is_forked())

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def Stream(self, device: Any = None) -> torch.Stream:
        return torch.Stream(device="emu")

    def stream(self, stream: torch.Stream) -> torch.Stream:
        return stream  # which is a context manager

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream("emu")

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize("emu")

    def manual_seed(self, seed: int) -> None:
        self.default_generators[0].manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self.default_generators[0].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self.default_generators[0].set_state(state)

    def get_device_name(self, device: Any = None) -> str:
        return "emulated device"

    def get_device_properties(self, device: Any = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(name=self.get_device_name(), total_memory=_native.emu_total_bytes())

    def get_per_process_memory_fraction(self, device: Any = None) -> float:
        return self._fraction

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        self._fraction = fraction
        _native.emu_set_limit_bytes(ctypes.c_uint64(int(fraction * _native.emu_total_bytes())))

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return torch.accelerator.get_memory_info("emu")

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def memory_stats(self, device: Any = None) -> dict[str, Any]:
        return torch.accelerator.memory_stats("emu")

    def memory_allocated(self, device: Any = None) -> int:
        return torch.accelerator.memory_allocated("emu")

    def max_memory_allocated(self, device: Any = None) -> int:
        return torch.accelerator.max_memory_allocated("emu")

    def memory_reserved(self, device: Any = None) -> int:
        return torch.accelerator.memory_reserved("emu")

    def max_memory_reserved(self, device: Any = None) -> int:
        return torch.accelerator.max_memory_reserved("emu")

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        torch.accelerator.reset_peak_memory_stats("emu")


torch._register_device_module("emu", _Module())
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
atexit.register(_native.emu_halt)
configure()
