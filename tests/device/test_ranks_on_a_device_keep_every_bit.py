"""DistributedDataParallel on two processes with a device each: the bits that it gives without penstock.

gloo takes no tensors of the emulated device, so its collectives go by way of host memory, or gradients are
averaged there by penstock.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.accelerator import orders, wanted
from tests.support.ranks import ROOT, together

DEVICE = wanted("emu")
SCRIPT = ROOT / "tests" / "distributed" / "training.py"
ORDERS = orders(DEVICE, "lazy", "stepped", "random", "newest")
WIDTH = 480  # of weights of under 1 MiB, some 30 MiB in all
# In the first step one bucket has all gradients. Where they are views of it, it comes back for each that the
# optimizer uses. One of 1 to 10 MiB takes a segment of 20 MiB, that of a deeper model one of its own size.
DEEP = "--depth 12"

pytestmark = [pytest.mark.usefixtures("emu"), pytest.mark.slow]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("how", "then"),
    [
        ("ddp --clip", "ddp --clip"),
        ("ddp_host --clip", "ddp_host --clip"),
        (f"ddp_views --parts 2 {DEEP}", f"ddp_host_views --parts 2 {DEEP}"),
    ],
)
def test_same_bits(how: str, then: str, order: str, tmp_path: Path) -> None:
    common = f"--device {DEVICE} --order {order} --width {WIDTH} --spill {tmp_path}"
    programs = [
        f"{how} {common} --host 256MiB",
        f"{then} {common} --host 128MiB --policy evict_all --precision autocast",  # all of that is staging
    ]
    printed = together(2, SCRIPT, *" --then ".join(programs).split(" "), timeout_s=600).splitlines()
    found = [json.loads(line.removeprefix("rows ")) for line in printed if line.startswith("rows ")]
    assert len(found) == len(programs)
    for every in found:
        for rows in every:
            assert all(row["same"] for row in rows)
            for row in rows[1:]:
                assert row["peak"] <= row["budget"]
                assert row["evicted"] > 0
