from __future__ import annotations

from typing import Any

import torch

from penstock.runtime.devices.drivers import make_driver

MIB = 1 << 20


def test_expanding_takes_no_memory_that_is_not_there(emu: Any) -> None:
    """Operators take some MiB beside; the device has none left."""
    torch.accelerator.empty_cache()
    emu.configure(memory="40MiB", order="random")
    driver, stream = make_driver(torch.device("emu:0")), torch.Stream(device="emu")
    content = torch.zeros(MIB, device="emu")
    content[::50] = 3.0
    expected = content.cpu()
    torch.accelerator.synchronize()
    packed = driver.pack(content.view(torch.uint8), "csr", 4, lambda size_bytes: True, stream)
    assert packed is not None and packed.numel() < 4 * MIB
    target = torch.full((MIB,), 7.0, device="emu")
    torch.accelerator.synchronize()
    taken = []
    for size_bytes in (4 * MIB, MIB, 64 << 10, 512):
        while (storage := driver.allocate(size_bytes, stream)) is not None:
            taken.append(storage)
    assert driver.unpack(packed, target.view(torch.uint8), "csr", 4, stream)
    stream.synchronize()
    assert torch.equal(target.cpu(), expected)
