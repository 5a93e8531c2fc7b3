"""Sample stores on the tests' NVMe/TCP target, whose namespaces are files here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.samples.remote import upload
from penstock.storage.nvme import lease
from tests.support.nvme_target.process import NQN, Namespace, Subsystem, Target

MIB = 1 << 20
TIMEOUT_S = 20.0  # of a mount: short enough for a test to wait for


class Clock:
    """Stands for that by which writers wait for each other. It goes on while one sleeps, at once.

    slept_s  by all of them
    at_nap   is called in each sleep
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept_s = self._asked_s = 0.0
        self.at_nap: Callable[[], object] = lambda: None
        begun_s = time.monotonic()
        for module in (lease, upload):
            monkeypatch.setattr(module, "monotonic", lambda: begun_s + self.slept_s)
            monkeypatch.setattr(module, "sleep", self._sleep)

    def waited_s(self) -> float:
        """What they slept since this was asked last, but for the moment that one who begins sleeps."""
        slept_s, self._asked_s = self.slept_s - self._asked_s, self.slept_s
        return round(slept_s - lease._OTHERS_S, 3)

    def _sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.at_nap()


def image_of(folder: Path, number: int = 0) -> Path:
    """The file that holds the bytes of a subsystem's namespace."""
    return folder / f"namespace-{number}"


@contextmanager
def serving(
    folder: Path,
    *,
    subsystems: int = 1,
    size_bytes: int = 32 * MIB,
    block_bytes: int = 512,
    honest: bool = True,
    **options: int,
) -> Iterator[Target]:
    """A target with subsystems of one namespace each, empty or as they were left.

    honest  the host is expected to break no rule
    """
    for number in range(subsystems):
        with open(image_of(folder, number), "ab") as image:
            image.truncate(size_bytes)
    offered = [
        Subsystem(NQN.format(number), [Namespace(1, size_bytes, block_bytes, image_of(folder, number))])
        for number in range(subsystems)
    ]
    with Target(offered, options=options) as target:
        yield target
        if honest:
            violations = target.violations()
            assert not violations, violations


def url_of(target: Target, number: int = 0, options: str = "", *, namespace: int = 1) -> str:
    return f"nvme+tcp://{target.address}:{target.port}/{NQN.format(number)}?ns={namespace}{options}"
