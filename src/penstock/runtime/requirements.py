"""Which torch a budget can be kept with."""

from __future__ import annotations

import re

import torch

from penstock.errors import DeviceUnavailable

# Older ones give weak references to storages that are gone, and hide compiled regions.
OLDEST_TORCH = (2, 10)


def require_torch() -> None:
    """Raises DeviceUnavailable where torch is too old to keep a budget with."""
    version = tuple(int(part) for part in re.findall(r"\d+", str(torch.__version__))[:2])
    if version < OLDEST_TORCH:
        raise DeviceUnavailable(
            f"torch {torch.__version__} does not say reliably when a tensor's storage is gone, and no budget "
            f"can be kept with it. Install torch {'.'.join(map(str, OLDEST_TORCH))} or newer."
        )
