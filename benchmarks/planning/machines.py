"""Machines made of data sheets: of a device, of the bus that it is on, and of drives."""

from __future__ import annotations

import penstock
from penstock.capture.datasheets import DATA_SHEETS

MEMORY_BYTES = {
    "a100": 40 << 30,
    "a100-80gb": 80 << 30,
    "h100": 80 << 30,
    "h200": 141 * 10**9,
    "v100": 16 << 30,
    "rtx4090": 24 << 30,
}

# Bytes per second each way that copies of pinned memory reach on sixteen lanes; the standards' raw
# rates are 31.5e9 and 63e9.
BUSES_BYTES_PER_S = {"pcie3": 12.5e9, "pcie4": 25e9, "pcie5": 50e9}

# An NVMe drive of its generation, sequential, as sold for data centers: (read, written) bytes per second.
DRIVES_BYTES_PER_S = {"pcie3": (3.2e9, 3.0e9), "pcie4": (6.8e9, 4.0e9), "pcie5": (13.0e9, 9.0e9)}


def machine_of(
    device: str,
    *,
    bus: str = "pcie4",
    drives: int = 1,
    drive: str = "pcie4",
    host_bytes: int = 0,
    disk_bytes: int = 4 << 40,
) -> penstock.Hardware:
    """A machine with one such device.

    device       a key of `MEMORY_BYTES`
    bus, drive   keys of `BUSES_BYTES_PER_S` and `DRIVES_BYTES_PER_S`
    drives       drives that tensors are striped over; 0 for none
    host_bytes   of host memory that tensors may take
    disk_bytes   of all drives together
    """
    sheet = DATA_SHEETS[device]
    read_bytes_per_s, write_bytes_per_s = DRIVES_BYTES_PER_S[drive]
    return penstock.Hardware(
        device_bytes=MEMORY_BYTES[device],
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
