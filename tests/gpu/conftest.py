from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import penstock
from tests.support import accelerator

DEVICE = accelerator.wanted("cuda")


@pytest.fixture(scope="session", autouse=True)
def loaded() -> Any:
    try:
        return accelerator.load(DEVICE)
    except accelerator.NoAccelerator as reason:
        pytest.skip(str(reason))


@pytest.fixture(autouse=True)
def device(loaded: Any) -> Iterator[None]:
    """A device as it is at first."""
    if loaded is not None:
        loaded.configure()
    yield


@pytest.fixture
def reproducible(request: pytest.FixtureRequest) -> Iterator[None]:
    with accelerator.reproducible(request.node.name):
        yield


@pytest.fixture(scope="session")
def machine(loaded: Any, tmp_path_factory: pytest.TempPathFactory) -> penstock.Hardware:
    seconds = 2 if DEVICE == "cuda" else 0.2
    measured = penstock.probe(tmp_path_factory.mktemp("probe"), device=DEVICE, time_limit_s=seconds)
    return replace(measured, host_bytes=4 << 30)
