"""What is copied out of a file that lies in the page cache does not stay mapped: a load grows by little."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import penstock
from penstock.runtime import resident

MIB = 1 << 20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs a peak that can be set back")
@pytest.mark.parametrize("writer", ["penstock", "torch", "safetensors"])
def test_it_grows_by_less_than_half_of_the_file(tmp_path: Path, writer: str) -> None:
    path = tmp_path / "state.safetensors"
    state = {str(index): torch.randn(12 * MIB // 4) for index in range(8)}
    if writer == "penstock":
        penstock.save(state, path)
    elif writer == "torch":
        torch.save(state, path)
    else:
        pytest.importorskip("safetensors.torch").save_file(state, path)
    wanted = {name: torch.ones_like(tensor) for name, tensor in state.items()}
    path.read_bytes()  # it is in the page cache
    before = resident.resident_bytes()
    if not resident.reset_peak():
        pytest.skip("the peak cannot be set back here")
    penstock.load(path, into=wanted)
    assert resident.peak_resident_bytes() - before < 48 * MIB
    assert all(torch.equal(wanted[name], tensor) for name, tensor in state.items())
