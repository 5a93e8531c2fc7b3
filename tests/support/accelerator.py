"""The accelerator that tests and benchmarks run on: "cuda", or "emu", the one that tests/device emulates.

PENSTOCK_TEST_DEVICE names it; without that tests/device takes "emu", tests/gpu and benchmarks/gpu.py take
"cuda". What only CUDA has, they leave out on the other one, and say so by `NOT_REHEARSED`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

KINDS = ("cuda", "emu")
NOT_REHEARSED = "not rehearsed: "
# Parts of the names of tests with kernels that in CUDA are not reproducible, or that torch takes for such.
_LOOSE = ("cnn", "programs")


class NoAccelerator(Exception):
    """It is not on this machine."""


def wanted(otherwise: str) -> str:
    """Which one it is to be: the one that the environment names, or the other."""
    kind = os.environ.get("PENSTOCK_TEST_DEVICE", otherwise)
    if kind not in KINDS:
        raise ValueError(f"PENSTOCK_TEST_DEVICE is {kind!r}: choose one of {', '.join(KINDS)}")
    return kind


def orders(kind: str, *names: str) -> tuple[str, ...]:
    """In which orders it can be told to carry out work: these, or its own alone."""
    return names if kind == "emu" else ("its own",)


def load(kind: str) -> Any:
    """Have torch and penstock know it. The module `emu`; None for CUDA. Raises NoAccelerator."""
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise NoAccelerator("needs a CUDA device")
        # Else products are not reproducible; and workspaces as large as these models would be all that a
        # budget holds.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "128")
        return None
    if "TORCH_CUDA_SANITIZER" in os.environ:  # it asks CUDA for each operator's stream
        torch.cuda.current_stream = lambda device=None: types.SimpleNamespace(cuda_stream=0)
    folder = str(Path(__file__).parents[1] / "device")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        importlib.import_module("emu.driver")
    except ImportError as error:
        raise NoAccelerator(str(error)) from error
    return importlib.import_module("emu")


def reset_peak(kind: str) -> None:
    torch.accelerator.reset_peak_memory_stats()
    if (emulated := load(kind)) is not None:
        emulated.reset_high_water()


def peak_reserved_bytes(kind: str) -> int:
    """Since `reset_peak`. CUDA has only what a run resets in every step, the emulated device its own mark."""
    emulated = load(kind)
    return torch.accelerator.max_memory_reserved() if emulated is None else int(emulated.high_water_bytes())


@contextlib.contextmanager
def reproducible(test: str) -> Iterator[None]:
    """Kernels give the same bits each time. In CUDA attention does so only where what cannot raises."""
    loosely = any(part in test for part in _LOOSE)
    torch.use_deterministic_algorithms(True, warn_only=loosely)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
