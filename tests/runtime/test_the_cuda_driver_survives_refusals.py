"""What CUDA refuses, the driver for it survives. Without a GPU: CUDA is a stub with torch's signatures."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> Error:
        if self.refuses:
            self.last_error = Error.memory_allocation
            return self.last_error
        self.locked.append(ptr)
        return Error.success

    def cudaHostUnregister(self, ptr: int) -> Error:
        self.locked.remove(ptr)
        return Error.success

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
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
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
