"""Machines of virtual time, as their data sheets have them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates are a second. Operations are of products of matrices and convolutions, dense.

    memory_bytes_per_s   of the device's memory
    to_device_bytes_per_s, to_host_bytes_per_s   of the bus
    disk_read_bytes_per_s, disk_write_bytes_per_s   of all drives, each whatever the other one does
    fp64, fp32, tf32, bf16   operations per second; bf16 is float16's rate too
    kernel_s             the least time of a kernel
    launch_s             of the host, for a kernel or a copy
    disk_latency_s       from a request to its first byte; those of several requests pass at once
    """

    name: str
    memory_bytes_per_s: float
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    fp64: float
    fp32: float
    tf32: float
    bf16: float
    kernel_s: float = 2e-6
    launch_s: float = 4e-6
    disk_latency_s: float = 80e-6


# A bus of sixteen lanes, each way: PCI Express Base Specification, 5.0 with 32 GT/s a lane, 4.0 with 16, of
# which 128/130 are data. Headers of packets are not taken off.
_PCIE5 = 16 * 32e9 * 128 / 130 / 8
_PCIE4 = _PCIE5 / 2

# An NVMe drive of four lanes of PCIe 4, in sequence, each way.
_NVME = 7e9

# The least time of a kernel, that of a launch and a drive's latency are in no data sheet: an empty kernel
# takes about 2 us from begin to end, eager PyTorch, from operator to operator, about 4 us on a fast core, and
# flash memory some 80 us to answer.
MACHINES = {
    machine.name: machine
    for machine in (
        # NVIDIA H100 Tensor Core GPU Datasheet, H100 SXM. Half of what it has for the tensor cores, which is
        # with sparsity.
        Machine(
            name="h100-pcie5",
            memory_bytes_per_s=3350e9,
            to_device_bytes_per_s=_PCIE5,
            to_host_bytes_per_s=_PCIE5,
            disk_read_bytes_per_s=4 * _NVME,
            disk_write_bytes_per_s=4 * _NVME,
            fp64=34e12,
            fp32=67e12,
            tf32=494.5e12,
            bf16=989.5e12,
        ),
        # NVIDIA Ada GPU Architecture, appendix A, GeForce RTX 4090: tensor cores dense, bf16 with fp32 sums.
        Machine(
            name="rtx4090-pcie4",
            memory_bytes_per_s=1008e9,
            to_device_bytes_per_s=_PCIE4,
            to_host_bytes_per_s=_PCIE4,
            disk_read_bytes_per_s=_NVME,
            disk_write_bytes_per_s=_NVME,
            fp64=1.29e12,
            fp32=82.6e12,
            tf32=82.6e12,
            bf16=165.2e12,
        ),
    )
}
