"""Host accumulation of gradients that lie on a GPU: exact, by page-locked memory and streams of its own."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.ranks import ROOT, torchrun

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_the_sum_is_exact() -> None:
    """Two processes on one GPU; both methods are measured, too."""
    printed = torchrun(2, ROOT / "tests" / "distributed" / "averaging.py", "gpu").splitlines()
    found = [json.loads(line.removeprefix("rank ")) for line in printed if line.startswith("rank ")]
    assert sorted(found) == [[rank, "gpu", {"cases": 24, "sizes": 2}] for rank in range(2)]
