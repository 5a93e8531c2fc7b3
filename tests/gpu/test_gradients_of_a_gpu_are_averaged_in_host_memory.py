"""Host accumulation of gradients that lie on a GPU: exact, by page-locked memory and streams of its own."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.support.accelerator import wanted
from tests.support.ranks import ROOT, torchrun

SIZES = 2 if wanted("cuda") == "cuda" else 0  # that are measured


def test_the_sum_is_exact(record_property: Callable[[str, object], None]) -> None:
    """Two processes on one GPU; both methods are measured, too."""
    if not SIZES:
        record_property(
            "not rehearsed", "all-reduce of a device's tensors, which gloo and NCCL have for CUDA only"
        )
    printed = torchrun(2, ROOT / "tests" / "distributed" / "averaging.py", "gpu").splitlines()
    found = [json.loads(line.removeprefix("rank ")) for line in printed if line.startswith("rank ")]
    assert sorted(found) == [[rank, "gpu", {"cases": 24, "sizes": SIZES}] for rank in range(2)]
