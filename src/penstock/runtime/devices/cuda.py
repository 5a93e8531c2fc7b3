"""CUDA devices: what torch.accelerator has no words for.

`make gpu` runs it on one. An H200 has, with torch 2.11. Access errors need torch 2.13: no GPU has run those.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable
from typing import Any

import torch

from penstock.core.log import log_once
from penstock.errors import DeviceUnavailable
from penstock.runtime.devices import packing
from penstock.runtime.devices.driver import Memory
from penstock.runtime.storage_methods import held_bytes, resize

# By the first, blocks are rounded otherwise; by the second, a segment that is free is given back, by the
# third a part of one; by the last, segments have other sizes.
_UNLIKE_THE_MODEL = (
    "roundup_power2_divisions",
    "garbage_collection_threshold",
    "expandable_segments:True",
    "large_segment_size_mb",
)


class _NvtxRange(contextlib.AbstractContextManager[None]):
    def __init__(self, text: str) -> None:
        self._text = text

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(self._text)

    def __exit__(self, *_: object) -> None:
        torch.cuda.nvtx.range_pop()


class TorchDriver:
    """An accelerator by torch.accelerator, torch.Stream, torch.Event, and the module that torch has for its
    kind; see penstock.runtime.devices.driver.Driver. A base for drivers: it page-locks nothing."""

    memory_manager = "torch's caching allocator"

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        # For each kernel: torch.accelerator asks more.
        self.current_stream: Callable[[], Any] = functools.partial(torch._C._accelerator_getStream, index)
        # What the program has set; torch says it of CUDA only.
        fraction = getattr(self._module, "get_per_process_memory_fraction", lambda _: 1.0)
        self._fraction_before = float(fraction(self.device))

    @property
    def name(self) -> str:
        return str(self._module.get_device_properties(self.device).name)

    @property
    def total_bytes(self) -> int:
        return int(self._module.get_device_properties(self.device).total_memory)

    @property
    def free_bytes(self) -> int:
        """That this process can still reserve."""
        allowed_bytes = int(self._fraction_before * self.total_bytes) - self.memory().reserved_bytes
        return max(min(int(self._module.mem_get_info(self.device)[0]), allowed_bytes), 0)

    def make_stream(self) -> Any:
        return torch.Stream(self.device)

    def make_event(self, timed: bool = False) -> Any:
        return torch.Event(self.device, enable_timing=timed)

    def use_device(self) -> None:
        torch._C._accelerator_setDeviceIndex(self.device.index)

    def _on(self, stream: Any, do: Callable[..., Any], *args: Any) -> Any:
        """Call it with the stream as the current one. torch's own contexts take ten times as long."""
        index = self.device.index
        device = torch._C._accelerator_exchangeDevice(index)
        try:
            before = torch._C._accelerator_getStream(index)
            if before == stream:
                return do(*args)
            torch._C._accelerator_setStream(stream)
            try:
                return do(*args)
            finally:
                torch._C._accelerator_setStream(before)
        finally:
            if device != index:
                torch._C._accelerator_exchangeDevice(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        self._on(stream, target.copy_, source, True)

    def allocate(self, size_bytes: int, stream: Any) -> torch.UntypedStorage | None:
        def made() -> torch.UntypedStorage:
            return torch.UntypedStorage(size_bytes, device=self.device)

        return self._if_there_is_memory(stream, made)  # type: ignore[no-any-return]

    def _if_there_is_memory(self, stream: Any, do: Callable[..., Any], *args: Any) -> Any:
        """As `_on`; None where the allocator refuses."""
        try:
            return self._on(stream, do, *args)
        except RuntimeError as error:
            if not self.is_out_of_memory(error):
                raise
            return None

    def reserve(self, size_bytes: int, stream: Any) -> int | None:
        content = self.allocate(size_bytes, stream)
        return None if content is None else content.data_ptr()

    def undivided(self, size_bytes: int) -> str | None:
        settings = _allocator_settings().replace(" ", "")
        found = re.search(r"max_split_size_mb:(\d+)", settings)
        if found is not None and int(found[1]) << 20 <= size_bytes:
            return f"max_split_size_mb:{found[1]}"
        return next((name for name in _UNLIKE_THE_MODEL if name in settings), None)

    def pack(
        self,
        content: torch.Tensor,
        codec: str,
        itemsize: int,
        admits: Callable[[int], bool],
        stream: Any,
    ) -> torch.Tensor | None:
        packed: torch.Tensor | None = self._if_there_is_memory(
            stream, packing.pack, content, codec, itemsize, admits
        )
        return packed

    def unpack(
        self, packed: torch.Tensor, content: torch.Tensor, codec: str, itemsize: int, stream: Any
    ) -> bool:
        def expand() -> bool:
            try:
                return packing.unpack(packed, content, codec, itemsize)
            except RuntimeError as error:
                if not self.is_out_of_memory(error):
                    raise
                # It takes some beside, which the host has.
                expanded = torch.empty_like(content, device="cpu")
                whole = packing.unpack(packed.cpu(), expanded, codec, itemsize)
                content.copy_(expanded)
                return whole

        return self._on(stream, expand)  # type: ignore[no-any-return]

    def resize(self, storage: torch.UntypedStorage, size_bytes: int, stream: Any) -> bool:
        if not size_bytes:  # memory goes back to the stream that it came from
            resize(storage, 0)
            return True
        return self._if_there_is_memory(stream, resize, storage, size_bytes) is not None

    def record_stream(self, storage: torch.UntypedStorage, stream: Any) -> None:
        with torch._C._DisableTorchDispatch():  # it is no operator of the program's
            content = torch.empty(0, dtype=torch.uint8, device=self.device)
            content.set_(storage, 0, (held_bytes(storage),), (1,))  # type: ignore[call-overload]
            content.record_stream(stream)

    def set_access_error(self, storage: torch.UntypedStorage, text: str | None) -> None:
        pass

    def page_lock(self, address: int, size_bytes: int) -> bool:
        return False

    def page_unlock(self, address: int) -> None:
        pass

    def allocated_bytes(self) -> int:
        return int(self._statistics()["allocated_bytes"]["all"]["current"])

    def memory(self) -> Memory:
        statistics = self._statistics()
        allocated, reserved = statistics["allocated_bytes"]["all"], statistics["reserved_bytes"]["all"]
        small = statistics["reserved_bytes"]["small_pool"]
        large_bytes = statistics["requested_bytes"]["large_pool"]["current"]
        peaks = allocated["peak"], reserved["peak"]
        return Memory(
            allocated["current"], reserved["current"], *peaks, small["current"], small["peak"], large_bytes
        )

    def _statistics(self) -> Any:
        """What the allocator counts. torch.accelerator.memory_stats takes 0.2 ms to make names of it."""
        return torch._C._accelerator_getDeviceStats(self.device.index)  # type: ignore[attr-defined]

    def reset_peaks(self) -> None:
        self._module.reset_peak_memory_stats(self.device)

    def empty_cache(self) -> None:
        self._module.empty_cache()

    def limit(self, reserved_bytes: int | None) -> None:
        set_fraction = getattr(self._module, "set_per_process_memory_fraction", None)
        if set_fraction is None:
            return
        fraction = self._fraction_before
        if reserved_bytes is not None:
            fraction = min(
                (reserved_bytes + 0.5) / self.total_bytes, fraction
            )  # torch rounds its product down
        set_fraction(fraction, self.device)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def profiler_range(self, text: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class CudaDriver(TorchDriver):
    """A CUDA device."""

    memory_manager = "CUDA caching allocator"

    def __init__(self, device: torch.device) -> None:
        _require_native_allocator()
        torch.cuda.init()  # the allocator counts from then on
        super().__init__(device)
        self._refused_before = self._statistics()["num_ooms"]
        self._set_access_error = access_errors(self.device)
        self._has_nvtx = hasattr(torch._C, "_nvtx")

    def set_access_error(self, storage: torch.UntypedStorage, text: str | None) -> None:
        if self._set_access_error is not None:
            self._set_access_error(storage, text)

    def page_lock(self, address: int, size_bytes: int) -> bool:
        with torch.accelerator.device_index(self.device.index):  # no memory of another one, for a context
            # It returns an error code, 0 for success.
            if int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)) == 0:
                return True
        # CUDA keeps the error for who asks next: torch does, after whatever it launches next. Python has no
        # cudaGetLastError, so that is this kernel.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.device)
        return False

    def page_unlock(self, address: int) -> None:
        with torch.accelerator.device_index(self.device.index):
            torch.cuda.cudart().cudaHostUnregister(address)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Where a convolution's workspace is refused, torch tries cuDNN's next algorithm; after the last one
        it says that there is none. Where NVML may not be asked, as in a part of a GPU (MIG), torch fails
        while it composes the error."""
        if super().is_out_of_memory(error):
            return True
        text = str(error)
        if "NVML_SUCCESS" in text and "CUDACachingAllocator" in text:
            return True
        lacks_engine = "unable to find an engine to execute this computation" in text
        return lacks_engine and self._statistics()["num_ooms"] > self._refused_before

    def profiler_range(self, text: str) -> contextlib.AbstractContextManager[None]:
        """An NVTX range, which Nsight Systems shows; nothing where torch was built without NVTX."""
        return _NvtxRange(text) if self._has_nvtx else contextlib.nullcontext()

    def _statistics(self) -> Any:
        return torch._C._cuda_memoryStats(self.device.index)  # type: ignore[attr-defined]


def _allocator_settings() -> str:
    """The text that torch has read last: each replaces the one before."""
    try:
        return str(torch._C._accelerator_getAllocatorSettings())
    except AttributeError:
        names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
        return next((os.environ[name] for name in names if name in os.environ), "")


def _require_native_allocator() -> None:
    """The other ones limit what is in use, not what they reserve, and do not count refusals or small blocks;
    those of a program's own count nothing. Raises DeviceUnavailable."""
    # Whatever its value, torch then takes each tensor's memory from CUDA, and counts nothing.
    uncached = "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ
    backend = "uncached" if uncached else torch.cuda.get_allocator_backend()
    if backend != "native":
        raise DeviceUnavailable(
            f"torch's allocator of CUDA memory is {backend!r}, and no budget can be kept with it: it does "
            "not limit what it reserves. Take backend:cudaMallocAsync out of PYTORCH_ALLOC_CONF and "
            "PYTORCH_CUDA_ALLOC_CONF, unset PYTORCH_NO_CUDA_MEMORY_CACHING, and do not call "
            "torch.cuda.memory.change_current_allocator"
        )


def access_errors(device: torch.device) -> Callable[[torch.UntypedStorage, str | None], None] | None:
    """What has each access to a storage of the device raise a text, and no longer where that is None.

    None where torch cannot, which is logged: then code that the clock does not see reads from address 0, and
    CUDA reports an illegal memory access.
    """
    set_error = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
    clear_error = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)

    def set_access_error(storage: torch.UntypedStorage, text: str | None) -> None:
        assert set_error is not None and clear_error is not None
        if text is None:
            clear_error(storage._cdata)
        else:
            set_error(storage._cdata, text)

    if set_error is None or clear_error is None:  # a message that is "" does not end it
        lacks = "cannot end that again" if clear_error is None else "has no such messages"
        reason = f"torch {torch.__version__} {lacks}"
    elif _errors_begin_and_end(set_access_error, device):
        return set_access_error
    else:
        reason = "tried here, none was raised, or it stayed"
    log_once(
        f"accesses to tensors that are away cannot be made errors: {reason}. Code that takes their address, "
        "such as a kernel that PyTorch does not know, may end with an illegal memory access"
    )
    return None


def _errors_begin_and_end(
    set_access_error: Callable[[torch.UntypedStorage, str | None], None], device: torch.device
) -> bool:
    tried = torch.zeros(16, dtype=torch.uint8, device=device)
    storage = tried.untyped_storage()
    storage.resize_(0)
    set_access_error(storage, "tried")
    try:
        storage.data_ptr()
    except RuntimeError:
        pass
    else:
        set_access_error(storage, None)
        return False
    set_access_error(storage, None)
    try:
        storage.resize_(16)
        tried.zero_()
    except RuntimeError:
        return False
    return True
