"""What a collective uses is pinned until it is done, as far as its Work tells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.capture.operators import describe
from penstock.runtime import collectives
from penstock.runtime.collectives import Collectives
from penstock.runtime.storages import ManagedStorage


class Work:
    """completes_in   so many questions; -1: nobody need ask"""

    def __init__(self, completes_in: int) -> None:
        self.completes_in = completes_in

    def is_completed(self) -> bool:
        self.completes_in -= 1
        return self.completes_in < 0


class Bench:
    """Collectives of one tensor. "meta" is in the place of a GPU, whose collectives are not gloo's."""

    def __init__(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(collectives, "_work_of", lambda result: result)
        held = SimpleNamespace(change_pins=lambda *args: None, poll=lambda: None, in_memory_bytes=lambda: 0)
        self.kernels: Any = SimpleNamespace(in_flight=False)
        self.collectives = Collectives(held, 1 << 20, self.kernels)  # type: ignore[arg-type]
        self.storage = torch.UntypedStorage(8, device=device)
        self.managed = ManagedStorage(self.storage, 8, lambda key: None)

    def launch(self, name: str, work: Work) -> None:
        operator = describe(getattr(torch.ops.c10d, name).default)
        written = [self.managed] if operator.written else []
        self.collectives.before_launch([self.managed], written)
        self.collectives.after_launch(operator, work, [self.managed], written, [])
        assert self.managed.pins == 1 and self.kernels.in_flight

    def assert_released(self, is_released: bool) -> None:
        self.collectives.release_done([])
        assert self.managed.pins == int(not is_released) and self.kernels.in_flight is not is_released


@pytest.mark.parametrize("name", ["send", "recv_", "_reduce_scatter_base_", "allreduce_"])
def test_on_a_gpu_work_tells_when_it_is_done(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("meta", monkeypatch)
    bench.launch(name, Work(2))
    bench.assert_released(False)
    assert bench.collectives.wait()
    bench.assert_released(True)


@pytest.mark.parametrize("name", ["send", "recv_", "recv_any_source_"])
def test_on_a_cpu_the_program_has_to_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("cpu", monkeypatch)
    work = Work(100)
    bench.launch(name, work)
    bench.assert_released(False)
    assert not bench.collectives.wait()  # which would take for ever
    work.completes_in = 0
    bench.assert_released(True)


def test_work_that_never_tells_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("cpu", monkeypatch)
    bench.launch("_reduce_scatter_base_", Work(0))
    bench.assert_released(False)
    bench.collectives.release_done([bench.managed])  # the program uses the results
    bench.assert_released(True)
