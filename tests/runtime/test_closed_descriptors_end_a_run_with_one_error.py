"""A program closes descriptors that are not its own, as daemons do: the step says so, and nothing hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.storage.native import UringTransport
from penstock.storage.transfer import TransportUnavailable
from tests.support import apart

SCRIPT = """
import os, sys, torch, penstock
from tests.support.runs import HARDWARE
with penstock.offload(device_budget="4MiB", spill_dir=sys.argv[1], hardware=HARDWARE,
                      io=penstock.IoOptions(paths=sys.argv[2])) as run:
    tensors = [torch.full((1 << 18,), float(i)) for i in range(12)]
    for number in range(6):
        with run.step():
            for tensor in tensors:
                tensor.mul_(1.0)
                if number == 3 and tensor is tensors[5]:
                    os.closerange(3, 256)
                    print("closed", flush=True)
"""


@pytest.mark.parametrize("path", ["io_uring direct", "posix direct"])
def test_a_step_says_that_transfers_broke(tmp_path: Path, path: str) -> None:
    if path.startswith("io_uring"):
        try:
            UringTransport().close()
        except TransportUnavailable as error:
            pytest.skip(str(error))
    done = apart.python(SCRIPT, tmp_path, path)
    assert done.stdout == "closed\n"
    assert done.returncode == 1
    error = next(line for line in done.stderr.splitlines() if line.startswith("penstock.errors."))
    assert error.startswith("penstock.errors.SpillError: transfers broke: Bad file descriptor")
    assert "os.closerange" in error, "what to do"
