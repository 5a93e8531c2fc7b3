"""What CUDA refuses, the driver for it survives. Without a GPU: CUDA is a stub with torch's signatures."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.runtime.devices import cuda as cuda_driver
from penstock.runtime.devices.cuda import CudaDriver
from penstock.runtime.devices.pinned import PinnedSlab


class Error(enum.IntEnum):
    """As torch._C._cudart.cudaError."""

    success = 0
    memory_allocation = 2


class Cuda(TorchDispatchMode):
    """A runtime that keeps its last error, and torch's kernels, which raise and end it after their launch:
    C10_CUDA_KERNEL_LAUNCH_CHECK."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses = True
        self.last_error = Error.success
        self.locked: list[int] = []
        self.locked_on: list[int] = []  # devices
        self.refused = 0  # allocations
        self.device = 0
        self.streams = [10, 20]  # the current one of each device: a tenth of it is the device, less one

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> Error:
        if self.refuses:
            self.last_error = Error.memory_allocation
            return self.last_error
        self.locked.append(ptr)
        self.locked_on.append(self.device)
        return Error.success

    def cudaHostUnregister(self, ptr: int) -> Error:
        self.locked.remove(ptr)
        return Error.success

    def exchange_device(self, index: int) -> int:
        before, self.device = self.device, index
        return before

    def current_stream(self, index: int) -> int:
        return self.streams[index]

    def set_stream(self, stream: int) -> None:
        self.device = stream // 10 - 1
        self.streams[self.device] = stream

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        error, self.last_error = self.last_error, Error.success
        if error:
            raise RuntimeError(f"CUDA error: {error.name}")
        return result


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    runtime = Cuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    for name, value in {
        "_accelerator_exchangeDevice": runtime.exchange_device,
        "_accelerator_maybeExchangeDevice": runtime.exchange_device,
        "_accelerator_getStream": runtime.current_stream,
        "_accelerator_setStream": runtime.set_stream,
        "_cuda_memoryStats": lambda device: {"num_ooms": runtime.refused},
    }.items():
        monkeypatch.setattr(torch._C, name, value, raising=False)
    with runtime:
        yield runtime


def test_to_page_lock_memory(cuda: Cuda) -> None:
    driver = CudaDriver(torch.device("cpu", 0))
    slab = PinnedSlab(1 << 20, driver.page_lock, driver.page_unlock)
    assert not slab.is_pinned
    assert torch.ones(2).tolist() == [1, 1]  # the program's next kernel
    slab.close()

    cuda.refuses = False
    slab = PinnedSlab(1 << 20, driver.page_lock, driver.page_unlock)
    assert slab.is_pinned and len(cuda.locked) == 1
    slab.close()
    assert not cuda.locked


def test_the_programs_current_device_stays(cuda: Cuda) -> None:
    driver = CudaDriver(torch.device("cpu", 1))
    cuda.refuses = False
    slab = PinnedSlab(1 << 20, driver.page_lock, driver.page_unlock)
    driver.copy(torch.zeros(2), torch.ones(2), 25)
    slab.close()
    assert cuda.locked_on == [1]
    assert cuda.device == 0 and cuda.streams == [10, 20]


def test_a_convolution_whose_workspace_is_refused_lacks_memory(cuda: Cuda) -> None:
    """torch tries cuDNN's algorithms in turn, and then has none."""
    cuda.refused = 3  # before
    driver = CudaDriver(torch.device("cpu", 0))
    error = RuntimeError("GET was unable to find an engine to execute this computation")
    assert not driver.is_out_of_memory(error)
    cuda.refused += 1
    assert driver.is_out_of_memory(error)
    assert not driver.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_memory_that_is_refused_where_nvml_may_not_be_asked(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a part of a GPU: torch fails while it composes the error."""
    driver = CudaDriver(torch.device("cpu", 0))

    def refuse(*_: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(cuda_driver, "resize", refuse)
    text = 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "c10/cuda/CUDACachingAllocator.cpp":1131'
    assert not driver.resize(torch.UntypedStorage(0), 8, 25)
    text = "an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal"):
        driver.resize(torch.UntypedStorage(0), 8, 25)
