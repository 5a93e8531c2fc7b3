"""Every error penstock raises on purpose.

::

    PenstockError
    ├── BudgetTooSmall        the step cannot run in the device budget; carries minimum_bytes
    ├── InvalidPlan           the plan checker refused a plan; carries its violations
    ├── InvalidSize           a byte size that cannot be read        (also a ValueError)
    ├── InvalidFile           a file that is not what it should be   (also a ValueError)
    ├── InvalidArgument       an argument that cannot be used        (also a ValueError)
    ├── DeviceUnavailable     the device asked for is not there
    ├── RankFailed            another process of the job failed; carries its rank
    ├── SpillError            the spill space cannot be used         (also an OSError)
    │   └── SpillSpaceFull    the disk, or the disk budget, is full
    ├── CheckpointError       a checkpoint cannot be written or read (also an OSError)
    │   └── InvalidCheckpoint  it is damaged, or something else      (also an InvalidFile)
    ├── SampleError           a sample store cannot be written or read (also an OSError)
    └── DistributedError      ranks cannot work together, or one was waited for in vain
                              (also a RuntimeError)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

_OSError = TypeVar("_OSError", bound=OSError)


def installing(extra: str) -> str:
    """What installs an extra: nothing is released, so that it comes from a clone."""
    return f"pip install '.[{extra}]' in your clone of penstock"


def with_errno(error: _OSError, number: int | None) -> _OSError:
    """The error, with the system's number of the reason."""
    error.errno = number
    return error


class PenstockError(Exception):
    """The root of all errors penstock raises on purpose."""


class BudgetTooSmall(PenstockError):
    """No plan can run the step inside the device budget.

    minimum_bytes   the smallest device budget at which the step can run
    """

    def __init__(self, message: str, minimum_bytes: int) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes

    def __reduce__(self) -> tuple[type, tuple[str, int]]:  # it travels between processes
        return type(self), (str(self), self.minimum_bytes)


class InvalidPlan(PenstockError):
    """The plan checker refused a plan.

    violations   one sentence for each rule the plan breaks
    """

    def __init__(self, violations: Sequence[str]) -> None:
        shown = "\n  ".join(violations[:10])
        more = f"\n  and {len(violations) - 10} more" if len(violations) > 10 else ""
        super().__init__(f"the plan breaks {len(violations)} rule(s):\n  {shown}{more}")
        self.violations = tuple(violations)

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...]]]:
        return type(self), (self.violations,)


class InvalidSize(PenstockError, ValueError):
    """A byte size that cannot be read, such as ``"8 gigs"``."""


class InvalidFile(PenstockError, ValueError):
    """A file that is damaged, of another kind, or of a later version."""


class InvalidArgument(PenstockError, ValueError):
    """An argument that cannot be used as given."""


class DeviceUnavailable(PenstockError):
    """The device asked for is not on this machine."""


class RankFailed(PenstockError):
    """Another process of this job failed, and this one cannot go on without it.

    rank   of the process that failed first
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (str(self), self.rank)


class SpillError(PenstockError, OSError):
    """The spill space cannot be used."""


class SpillSpaceFull(SpillError):
    """The disk, or the disk budget, has no room for a tensor that has to leave memory."""


class CheckpointError(PenstockError, OSError):
    """A checkpoint cannot be written or read."""


class InvalidCheckpoint(InvalidFile, CheckpointError):
    """A checkpoint that is damaged, is none, or holds what cannot be loaded."""


class SampleError(PenstockError, OSError):
    """A sample store cannot be written or read."""


class DistributedError(PenstockError, RuntimeError):
    """The ranks of a process group cannot work together, or one of them was waited for in vain."""
