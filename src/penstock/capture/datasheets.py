"""Data sheets of devices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataSheet:
    """What a device is capable of in training, dense, without sparsity.

    flops_per_s   of matrix products, by bits of the element type
    bytes_per_s   of device memory
    launch_s      the least time a kernel takes
    efficiency    fraction of both rates that kernels reach in practice
    """

    flops_per_s: dict[int, float]
    bytes_per_s: float
    launch_s: float
    efficiency: float = 0.7


# From the vendors' data sheets. Matrix products of 32-bit floats are taken at TF32 rate only
# where the vendor's default for training is TF32; PyTorch's default is not.
DATA_SHEETS = {
    "a100": DataSheet({16: 312e12, 32: 19.5e12, 64: 9.7e12}, 1555e9, 4e-6),
    "a100-80gb": DataSheet({16: 312e12, 32: 19.5e12, 64: 9.7e12}, 2039e9, 4e-6),
    "h100": DataSheet({16: 989e12, 32: 67e12, 64: 34e12}, 3350e9, 4e-6),
    "h200": DataSheet({16: 989e12, 32: 67e12, 64: 34e12}, 4800e9, 4e-6),
    "v100": DataSheet({16: 125e12, 32: 15.7e12, 64: 7.8e12}, 900e9, 5e-6),
    "rtx4090": DataSheet({16: 165e12, 32: 82.6e12, 64: 1.3e12}, 1008e9, 4e-6),
}
