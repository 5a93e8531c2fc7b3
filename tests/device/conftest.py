from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """torch is another one in a process that has the device: other tests would run on it."""
    ours = [item for item in items if HERE in item.path.parents]
    if len(ours) < len(items):
        for item in ours:
            item.add_marker(pytest.mark.skip(reason="needs a process of its own: pytest tests/device"))


@pytest.fixture(scope="session")
def compiled() -> Any:
    try:
        importlib.import_module("emu.driver")
    except ImportError as error:
        pytest.skip(str(error))
    return importlib.import_module("emu")


@pytest.fixture(autouse=True)
def emu(compiled: Any) -> Iterator[Any]:
    """The module, and a device as it is at first. Errors that a test has left come out at its end."""
    compiled.configure()
    yield compiled
    torch.emu.set_per_process_memory_fraction(1.0)  # type: ignore[attr-defined]
    torch.accelerator.synchronize()
