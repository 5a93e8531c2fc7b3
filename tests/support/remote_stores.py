"""Sample stores on the tests' NVMe/TCP target, whose namespaces are files here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.nvme_target.process import NQN, Namespace, Subsystem, Target

MIB = 1 << 20
TIMEOUT_S = 20.0  # of a mount: short enough for a test to wait for


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
