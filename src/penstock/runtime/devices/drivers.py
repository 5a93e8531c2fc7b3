"""The table of accelerators, and the checks of a device that the user names."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.errors import DeviceUnavailable, InvalidArgument
from penstock.runtime.devices.cuda import CudaDriver
from penstock.runtime.devices.driver import Driver

# By torch's name for the kind. A device that torch.accelerator knows takes a line here, and a driver, for
# which penstock.runtime.devices.cuda.TorchDriver is a base.
DRIVERS: dict[str, Callable[[torch.device], Driver]] = {"cuda": CudaDriver}


def device_of(wanted: str | torch.device) -> torch.device:
    """Parse a device, and check that it can be used. Raises InvalidArgument, DeviceUnavailable."""
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(f"{wanted!r} is no device: give {_usable()}") from error
    if device.type == "cpu":
        return device
    if device.type not in DRIVERS:
        raise DeviceUnavailable(f"penstock cannot use {str(device)!r}: give {_usable()}")
    module = torch.get_device_module(device)
    count = module.device_count() if module.is_available() else 0
    if not 0 <= (device.index or 0) < count:
        raise DeviceUnavailable(
            f"{str(device)!r} is not on this machine, torch {torch.__version__} sees {count} "
            f"{device.type.upper()} device(s). Give device='cpu', or check that the driver works (nvidia-smi "
            "for CUDA), and that this build of torch is for it."
        )
    return device


def make_driver(device: torch.device) -> Driver:
    """Make the driver of an accelerator. Raises as `device_of`."""
    device = device_of(device)
    return DRIVERS[device.type](device)


def _usable() -> str:
    return ", ".join(["'cpu'", *(f"'{kind}' or '{kind}:<index>'" for kind in DRIVERS)])
