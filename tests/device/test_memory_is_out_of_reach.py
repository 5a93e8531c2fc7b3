"""What a GPU's memory does to those who use it wrongly: nothing of it is read as if it were well."""

from __future__ import annotations

import subprocess
import textwrap
from typing import Any

import pytest
import torch

from tests.support import apart

HEADER = "import ctypes, os, sys, torch\nsys.path.insert(0, 'tests/device')\nimport emu\n"
pytestmark = pytest.mark.usefixtures("emu")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return apart.python(HEADER + textwrap.dedent(code))


@pytest.mark.parametrize(
    "access",
    [
        "ctypes.c_float.from_address(t.data_ptr()).value",
        "ctypes.memset(t.data_ptr(), 0, 4)",
        "torch.frombuffer((ctypes.c_char * 16).from_address(t.data_ptr()), dtype=torch.float32).sum()",
    ],
)
def test_the_host_cannot_touch_it(access: str) -> None:
    done = run(f"t = torch.ones(4).to('emu')\ntorch.accelerator.synchronize()\n{access}\nprint('survived')")
    assert done.returncode == -11 and "touched by the host" in done.stderr and not done.stdout


def test_the_same_program_without_the_access_survives() -> None:
    done = run("print(torch.ones(4).to('emu').sum().item(), torch.accelerator.current_accelerator())")
    assert done.returncode == 0 and done.stdout == "4.0 emu\n"


def test_a_forked_process_is_refused_and_lives() -> None:
    done = run("""
        t = torch.ones(4).to('emu')
        if (child := os.fork()) == 0:
            try:
                t + 1
            except RuntimeError as error:
                print(error)
            del t
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """)
    assert done.returncode == 0 and "forked" in done.stdout and "7\n" in done.stdout


def test_a_kernel_outside_of_a_storage_is_an_illegal_access() -> None:
    tensor = torch.ones(1000, device="emu")
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tensor + 1
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tensor.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_new_memory_is_full_of_nan(dtype: torch.dtype) -> None:
    torch.zeros(1000, device="emu")
    assert torch.empty(1000, device="emu", dtype=dtype).isnan().all()
    assert (torch.empty(1000, device="emu", dtype=torch.int32) == -1).all()


def test_memory_that_was_given_back_is_nonsense_in_its_streams_order(emu: Any) -> None:
    """The alias of what is freed is read by work that was launched before, and by work launched after."""
    emu.configure(order="lazy")
    tensor = torch.full((1000,), 3.0, device="emu")
    alias = torch.empty(0, device="emu").set_(tensor.untyped_storage())
    before = alias + 0
    stale = torch.empty(1000, device="emu")
    torch.accelerator.synchronize()
    address = tensor.data_ptr()
    del tensor, alias
    again = torch.empty(1000, device="emu")  # the same memory
    assert again.data_ptr() == address and again.isnan().all()
    assert (before == 3).all() and stale.isnan().all()


def test_page_locked_memory_is_read_when_the_copy_is_carried_out(emu: Any) -> None:
    emu.configure(order="lazy")
    host, pageable = torch.ones(8).pin_memory(), torch.ones(8)
    assert host.is_pinned() and not pageable.is_pinned()
    late, early = host.to("emu", non_blocking=True), pageable.to("emu", non_blocking=True)
    host.fill_(2)
    pageable.fill_(2)
    assert late.cpu().tolist() == [2.0] * 8 and early.cpu().tolist() == [1.0] * 8


def test_page_locked_memory_is_written_when_the_copy_is_carried_out(emu: Any) -> None:
    emu.configure(order="lazy")
    host = torch.zeros(8).pin_memory()
    host.copy_(torch.ones(8, device="emu"), non_blocking=True)
    assert host.tolist() == [0.0] * 8
    torch.accelerator.synchronize()
    assert host.tolist() == [1.0] * 8


def test_page_locked_memory_outlives_its_copies(emu: Any) -> None:
    emu.configure(order="lazy")
    there = [torch.full((1 << 16,), float(i)).pin_memory().to("emu", non_blocking=True) for i in range(20)]
    others = [torch.full((1 << 16,), -1.0).pin_memory() for _ in range(20)]
    assert [float(tensor.mean()) for tensor in there] == list(map(float, range(20)))
    assert all(float(other.mean()) == -1 for other in others)
