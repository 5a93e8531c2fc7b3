"""penstock's driver of the emulated device: importing this is what lets runs use "emu"."""

from __future__ import annotations

from penstock.capture import slices
from penstock.runtime.devices.cuda import TorchDriver
from penstock.runtime.devices.drivers import DRIVERS

from . import page_lock, page_unlock


class EmuDriver(TorchDriver):
    """All of torch's, and page-locked memory."""

    memory_manager = "emulated caching allocator"

    def page_lock(self, address: int, size_bytes: int) -> bool:
        page_lock(address, size_bytes)
        return True

    def page_unlock(self, address: int) -> None:
        page_unlock(address)


DRIVERS["emu"] = EmuDriver
slices.LEAST_BYTES["emu"] = 1 << 20  # tests give it small tensors, and smaller budgets
