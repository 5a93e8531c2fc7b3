"""A profiler of the device is told of every step and copy: which, of what, and for how long."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

import penstock
from penstock.runtime.devices.cpu import CpuDevice
from penstock.storage.spill import SpillSpace
from tests.support.checked import CheckedDriver, checked_run


class Watching(CheckedDriver):
    """Notes what was copied within each mark."""

    def __init__(self, *arguments: int, **options: bool) -> None:
        super().__init__(*arguments, **options)
        self.within: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def profiler_range(self, text: str) -> Iterator[None]:
        self._local.mark = text
        try:
            with super().profiler_range(text):
                yield
        finally:
            self._local.mark = ""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: object) -> None:
        self.within.append((self._local.mark, source.nbytes))
        super().copy(target, source, stream)  # type: ignore[arg-type]


def test_each_copy_of_an_accelerator_is(tmp_path: Path) -> None:
    """What goes to the disk is also copied to host memory, as what stays there is, and the other way."""
    with SpillSpace(tmp_path, penstock.IoOptions(paths=["posix direct"])) as spill:
        with checked_run(spill, 64 << 10, make_driver=Watching) as run:
            for tier in ("host", "disk"):
                tensor = torch.arange(512.0).mul_(2)
                managed = run.clock.storages.find(tensor.untyped_storage())
                assert managed is not None
                with run.engine.lock:
                    run.engine.evict(managed, tier, release=True)
                run.engine.drain()
                tensor.mul_(1)
        assert isinstance(run.driver, Watching)
        expected = ["host-out", "host-in", "disk-out", "host-out", "disk-in", "host-in"]
        names = [mark.partition(":")[0].removeprefix("penstock-") for mark in run.driver.marks]
        assert names == expected
        assert all(mark.endswith(" 2048 bytes") for mark in run.driver.marks)
        assert run.driver.within == [(mark, 2048) for mark in run.driver.marks if "-host-" in mark]


def test_each_step_is(tmp_path: Path, hardware: penstock.Hardware) -> None:
    marks: list[str] = []

    @contextlib.contextmanager
    def profiler_range(self: CpuDevice, text: str) -> Iterator[None]:
        marks.append(f"begin {text}")
        try:
            yield
        finally:
            marks.append(f"end {text}")

    with penstock.offload(device_budget="1GiB", spill_dir=tmp_path, hardware=hardware) as run:
        run._device.profiler_range = profiler_range.__get__(run._device)  # type: ignore[method-assign]
        for kind in (None, "evaluation"):
            with run.step(kind):
                marks.append("kernels")
                torch.ones(8).add(1)
    names = ["penstock step", "penstock step evaluation"]
    assert marks == [text for name in names for text in (f"begin {name}", "kernels", f"end {name}")]
