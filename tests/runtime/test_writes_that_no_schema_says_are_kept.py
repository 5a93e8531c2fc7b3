"""On an accelerator, what a kernel may write whose schema does not say so leaves with what was written.

They are a custom operator that says nothing of its writes, and a kernel of Triton that the program launches
itself. Triton, which needs a GPU, is a stand-in with its signatures.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._inductor.output_code  # which looks for triton: before that is a stand-in

from penstock.runtime.devices.accelerator import AcceleratorDevice
from penstock.runtime.storages import AWAY
from penstock.storage.spill import SpillSpace
from tests.support.checked import CheckedRun, checked_run

NUMBERS = 256
ZEROS = bytes(4 * NUMBERS)


def clear(tensor: torch.Tensor) -> None:
    """As a kernel does that is given an address."""
    address = tensor.data_ptr()
    assert address, "an illegal memory access"
    ctypes.memmove(address, ZEROS, len(ZEROS))


class JITFunction:
    stream: Any = None  # that it is launched to

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        self.stream.synchronize()  # carried out after what that has
        clear(kwargs.get("output", args[0] if args else None))

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> JITFunction:
    modules = {name: ModuleType(name) for name in ("triton", "triton.runtime", "triton.runtime.jit")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    modules["triton.runtime.jit"].JITFunction = JITFunction  # type: ignore[attr-defined]
    return JITFunction()


@pytest.fixture
def operator() -> Iterator[Callable[[torch.Tensor], None]]:
    library = torch.library.Library("penstock_tests", "FRAGMENT")
    library.define("clear_unsaid(Tensor x) -> ()")
    library.impl("clear_unsaid", clear, "CPU")
    yield torch.ops.penstock_tests.clear_unsaid
    library._destroy()


def leave(run: CheckedRun, tensor: torch.Tensor, release: bool) -> None:
    managed = run.clock.storages.find(tensor.untyped_storage())
    assert managed is not None
    with run.engine.lock:
        run.engine.evict(managed, release=release)
    run.engine.drain()
    assert managed.state == AWAY if release else managed.clean


def check(spill: SpillSpace, write: Callable[[torch.Tensor], None], away: bool) -> None:
    with checked_run(spill, 1 << 20) as run:
        tensor = torch.arange(float(NUMBERS)).mul_(2)
        leave(run, tensor, release=away)
        JITFunction.stream = run.driver.current_stream()
        write(tensor)
        leave(run, tensor, release=True)
        assert not tensor.add(0).any()


@pytest.mark.parametrize("away", [False, True], ids=["clean", "away"])
def test_by_an_operator(spill: SpillSpace, operator: Callable[[torch.Tensor], None], away: bool) -> None:
    check(spill, operator, away)


@pytest.mark.parametrize("away", [False, True], ids=["clean", "away"])
@pytest.mark.parametrize("named", [False, True], ids=["", "by name"])
def test_by_a_kernel_of_triton(
    spill: SpillSpace, kernel: JITFunction, away: bool, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = JITFunction.run
    # It is launched behind what comes: the host need not wait.
    monkeypatch.setattr(AcceleratorDevice, "synchronize", lambda device: pytest.fail("the host waits"))
    check(spill, lambda tensor: kernel[1,](output=tensor) if named else kernel[1,](tensor), away)
    assert JITFunction.run is own
