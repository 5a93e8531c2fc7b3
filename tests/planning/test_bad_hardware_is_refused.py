"""Hardware that cannot be is refused, and so is a tier with room that no link leads to."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.core.hardware import LINKS, Hardware
from penstock.errors import InvalidArgument, InvalidFile
from tests.support.traces import machine

REAL = machine(host_bytes=2**40)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device_bytes": -1}, "device_bytes is -1: give 0 to"),
        ({"host_bytes": 2**70}, "host_bytes is"),
        ({"disk_bytes": math.nan}, "disk_bytes is nan"),
        *(
            ({f"{link}_bytes_per_s": -1.0}, f"{link}_bytes_per_s is -1.0: give a rate above 0")
            for link in LINKS
        ),
        *(({f"{link}_bytes_per_s": math.nan}, f"{link}_bytes_per_s is nan") for link in LINKS),
        *(({f"{link}_latency_s": -1e-6}, f"{link}_latency_s is -1e-06: give seconds") for link in LINKS),
        *(({f"{link}_latency_s": math.inf}, f"{link}_latency_s is inf") for link in LINKS),
        ({"compress_bytes_per_s": 0.0}, "compress_bytes_per_s is 0.0: give a rate above 0"),
        ({"expand_bytes_per_s": math.nan}, "expand_bytes_per_s is nan"),
        ({"duplex": 0.0}, "duplex is 0.0"),
        ({"duplex": math.nan}, "duplex is nan"),
        ({"copy_overhead_s": -1e-6}, "copy_overhead_s is -1e-06: give seconds"),
        ({"copy_overhead_s": math.inf}, "copy_overhead_s is inf"),
        ({"byte_overhead_s": -1e-9}, "byte_overhead_s is -1e-09: give seconds"),
        ({"byte_overhead_s": math.nan}, "byte_overhead_s is nan"),
        ({"measured_rates": {"tape": ((1, 1.0),)}}, "names the link 'tape'"),
        ({"measured_rates": {"disk_read": ((4096, 0.0),)}}, "disk_read are .* give rates above 0"),
        ({"measured_rates": {"disk_read": ((4096, math.nan),)}}, "give rates above 0"),
        ({"measured_rates": {"disk_read": ((0, 1.0),)}}, "give sizes that ascend"),
        ({"measured_rates": {"disk_read": ((8, 1.0), (4, 1.0))}}, "give sizes that ascend"),
    ],
)
def test_a_number_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        replace(REAL, **changes)


def test_files_that_do_not_know_what_a_copy_costs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    replace(REAL, copy_overhead_s=1e-4, byte_overhead_s=1e-10).save(path)
    assert Hardware.load(path).overhead_s(10**6) == pytest.approx(2e-4)
    document = json.loads(path.read_text())
    del document["value"]["copy_overhead_s"], document["value"]["byte_overhead_s"]
    path.write_text(json.dumps(document))
    assert Hardware.load(path) == REAL


@pytest.mark.parametrize("link", LINKS)
def test_a_tier_without_a_link(link: str) -> None:
    cut = replace(REAL, **{f"{link}_bytes_per_s": 0.0})
    with pytest.raises(InvalidArgument, match=f"cannot be reached: {link}_bytes_per_s is 0"):
        cut.require_rates()
    tier = "disk" if link.startswith("disk") else "host"
    replace(cut, **{f"{tier}_bytes": 0}).require_rates()
    replace(cut, measured_rates={link: ((4096, 1e9),)}).require_rates()


def test_a_disk_behind_the_bus_needs_the_bus() -> None:
    alone = Hardware(device_bytes=1, disk_bytes=1, disk_read_bytes_per_s=1.0, disk_write_bytes_per_s=1.0)
    with pytest.raises(InvalidArgument, match=r"device_to_host_bytes_per_s and host_to_device_b.* are 0"):
        alone.require_rates()
    replace(alone, disk_shares_bus=False).require_rates()


def test_what_is_well(tmp_path: Path) -> None:
    REAL.require_rates()
    Hardware(device_bytes=2**30).require_rates()
    REAL.save(tmp_path / "hardware.json")
    assert Hardware.load(tmp_path / "hardware.json") == REAL


def test_a_file_with_something_wrong(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    REAL.save(path)
    whole = path.read_text()
    for old, new in (
        ('"device_bytes":', '"device_bytes":-'),
        ('"duplex":1.0', '"duplex":null'),
        ('"duplex":1.0', '"duplex":7'),
        ('"disk_shares_bus":false', '"disk_shares_bus":"no"'),
    ):
        assert old in whole
        path.write_text(whole.replace(old, new))
        with pytest.raises(InvalidFile, match=r"hardware\.json"):
            Hardware.load(path)
