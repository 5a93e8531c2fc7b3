"""Data sheets of devices, buses and drives, and the Hardware that they make together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import InvalidArgument

if TYPE_CHECKING:
    from penstock.core.hardware import Hardware


@dataclass(frozen=True)
class DataSheet:
    """What a device is capable of in training, dense, without sparsity.

    flops_per_s   by bits of the element type: floating-point operations per second in matrix products
    bytes_per_s   of device memory
    launch_s      the least time a kernel takes
    memory_bytes  of the device; 0 where it is not stated
    efficiency    fraction of both that kernels reach in practice
    """

    flops_per_s: dict[int, float]
    bytes_per_s: float
    launch_s: float
    memory_bytes: int = 0
    efficiency: float = 0.7


# From the vendors' data sheets. Matrix products of 32-bit floats are taken at TF32 rate only
# where the vendor's default for training is TF32; PyTorch's default is not.
DATA_SHEETS = {
    "a100": DataSheet({16: 312e12, 32: 19.5e12, 64: 9.7e12}, 1555e9, 4e-6, 40 << 30),
    "a100-80gb": DataSheet({16: 312e12, 32: 19.5e12, 64: 9.7e12}, 2039e9, 4e-6, 80 << 30),
    "h100": DataSheet({16: 989e12, 32: 67e12, 64: 34e12}, 3350e9, 4e-6, 80 << 30),
    "h200": DataSheet({16: 989e12, 32: 67e12, 64: 34e12}, 4800e9, 4e-6, 141 * 10**9),
    "v100": DataSheet({16: 125e12, 32: 15.7e12, 64: 7.8e12}, 900e9, 5e-6, 16 << 30),
    "rtx4090": DataSheet({16: 165e12, 32: 82.6e12, 64: 1.3e12}, 1008e9, 4e-6, 24 << 30),
}

# Bytes per second each way that copies of pinned memory reach on sixteen lanes; the standards' raw
# rates are 31.5e9 and 63e9.
BUSES_BYTES_PER_S = {"pcie3": 12.5e9, "pcie4": 25e9, "pcie5": 50e9}

# An NVMe drive of its generation, sequential, as sold for data centers: (read, written) bytes per second.
DRIVES_BYTES_PER_S = {"pcie3": (3.2e9, 3.0e9), "pcie4": (6.8e9, 4.0e9), "pcie5": (13.0e9, 9.0e9)}


def hardware(
    device: str,
    *,
    bus: str = "pcie4",
    drives: int = 1,
    drive: str = "pcie4",
    host_bytes: int = 0,
    disk_bytes: int = 4 << 40,
) -> Hardware:
    """A machine with one such device.

    device       a key of `DATA_SHEETS`
    bus, drive   keys of `BUSES_BYTES_PER_S` and `DRIVES_BYTES_PER_S`
    drives       drives that tensors are striped over; 0 for none
    host_bytes   of host memory that tensors may take
    disk_bytes   of all drives together

    Raises InvalidArgument where one of them is unknown.
    """
    sheet = DATA_SHEETS.get(device)
    if sheet is None or not sheet.memory_bytes:
        raise InvalidArgument(f"no data sheet for {device!r}: give one of {', '.join(DATA_SHEETS)}")
    for name, table in ((bus, BUSES_BYTES_PER_S), (drive, DRIVES_BYTES_PER_S)):
        if name not in table:
            raise InvalidArgument(f"{name!r} is no bus: give one of {', '.join(table)}")
    if drives < 0:
        raise InvalidArgument(f"{drives} drives: give 0 or more")
    from penstock.core.hardware import Hardware  # not for those who ask which sheets there are

    read_bytes_per_s, write_bytes_per_s = DRIVES_BYTES_PER_S[drive]
    return Hardware(
        device_bytes=sheet.memory_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes if drives else 0,
        device_to_host_bytes_per_s=BUSES_BYTES_PER_S[bus],
        host_to_device_bytes_per_s=BUSES_BYTES_PER_S[bus],
        disk_read_bytes_per_s=drives * read_bytes_per_s,
        disk_write_bytes_per_s=drives * write_bytes_per_s,
        device_to_host_latency_s=10e-6,
        host_to_device_latency_s=10e-6,
        disk_read_latency_s=60e-6,
        disk_write_latency_s=20e-6,
        compress_bytes_per_s=sheet.bytes_per_s * sheet.efficiency / 2,
        expand_bytes_per_s=sheet.bytes_per_s * sheet.efficiency / 1.5,
        name=f"{device}, {bus}, {drives} x {drive} NVMe",
    )
