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
_PCIE3 = _PCIE4 / 2

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
        # FlashNeuron's (its table 1): NVIDIA V100 GPU Datasheet, V100 PCIe, which has no tf32; two Samsung
        # PM1725b, each with the rates of the paper.
        Machine(
            name="v100-pm1725b",
            memory_bytes_per_s=900e9,
            to_device_bytes_per_s=_PCIE3,
            to_host_bytes_per_s=_PCIE3,
            disk_read_bytes_per_s=2 * 6.3e9,
            disk_write_bytes_per_s=2 * 3.3e9,
            fp64=7e12,
            fp32=14e12,
            tf32=14e12,
            bf16=112e12,
        ),
        # moDNN's (section 7): Tesla K40 GPU Accelerator Board Specification, at its base clock,
        # float32 alone. No drive is named, and none is used: this is what four lanes carry.
        Machine(
            name="k40",
            memory_bytes_per_s=288e9,
            to_device_bytes_per_s=_PCIE3,
            to_host_bytes_per_s=_PCIE3,
            disk_read_bytes_per_s=_PCIE3 / 4,
            disk_write_bytes_per_s=_PCIE3 / 4,
            fp64=1.43e12,
            fp32=4.29e12,
            tf32=4.29e12,
            bf16=4.29e12,
        ),
        # G10's (its table 2): NVIDIA A100 Tensor Core GPU Datasheet, 40 GB, without sparsity; a Z-NAND drive
        # with the rates and the read latency of the paper.
        Machine(
            name="a100-znand",
            memory_bytes_per_s=1555e9,
            to_device_bytes_per_s=_PCIE3,
            to_host_bytes_per_s=_PCIE3,
            disk_read_bytes_per_s=3.2e9,
            disk_write_bytes_per_s=3.0e9,
            fp64=9.7e12,
            fp32=19.5e12,
            tf32=156e12,
            bf16=312e12,
            disk_latency_s=20e-6,
        ),
        # Fastensor's (its table 7): the same data sheet, 80 GB PCIe, behind a processor of PCIe 3; Samsung
        # 980, 1 TB, by its data sheet.
        Machine(
            name="a100-980",
            memory_bytes_per_s=1935e9,
            to_device_bytes_per_s=_PCIE3,
            to_host_bytes_per_s=_PCIE3,
            disk_read_bytes_per_s=3.5e9,
            disk_write_bytes_per_s=3.0e9,
            fp64=9.7e12,
            fp32=19.5e12,
            tf32=156e12,
            bf16=312e12,
        ),
    )
}
