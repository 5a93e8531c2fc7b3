from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.units import parse_bytes
from tests.support import accelerator

HERE = Path(__file__).parent
DEVICE = accelerator.wanted("emu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """torch is another one in a process that has the device: other tests would run on it."""
    ours = [item for item in items if HERE in item.path.parents]
    if len(ours) < len(items):
        for item in ours:
            item.add_marker(pytest.mark.skip(reason="needs a process of its own: pytest tests/device"))


@pytest.fixture(scope="session")
def loaded() -> Any:
    try:
        return accelerator.load(DEVICE)
    except accelerator.NoAccelerator as reason:
        pytest.skip(str(reason))


@pytest.fixture(autouse=True)
def configure(loaded: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """A device as it is at first, and what makes it another one, where it is emulated: emu.configure. Errors
    that a test has left come out at its end."""
    if loaded is None:
        gc.collect()
        torch.cuda.empty_cache()  # what other tests have left there
        with accelerator.reproducible(request.node.name):
            yield _limit_cuda
    else:
        loaded.configure()
        yield loaded.configure
    torch.get_device_module(DEVICE).set_per_process_memory_fraction(1.0)
    torch.accelerator.synchronize()


def _limit_cuda(memory: str | None = None, **_: Any) -> None:
    """As far as CUDA can be told what the emulated device can: how much memory there is beside what others
    have."""
    total_bytes, fraction = torch.cuda.get_device_properties(0).total_memory, 1.0
    if memory is not None:
        fraction = (torch.cuda.memory_reserved() + parse_bytes(memory) + 0.5) / total_bytes
    torch.cuda.set_per_process_memory_fraction(fraction)


@pytest.fixture
def emu(loaded: Any, configure: object) -> Any:
    """The module, for tests of the emulated device itself."""
    if loaded is None:
        pytest.skip("shows what the emulated device does")
    return loaded
