"""What to say when a store, or a sample, cannot be read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import SampleError, with_errno
from penstock.samples.layout import DIRECTORY, data_file_name
from penstock.samples.manifest import AGAIN
from penstock.storage.nvme.namespace import TargetError

if TYPE_CHECKING:
    from penstock.samples.places import Place


_NO_STORE = "Give the folder of a store, or make one: penstock samples pack SOURCE DEST"
_DISK = "Look at the disk's health (dmesg), or use another copy"
_REMEDIES = {
    errno.ENOENT: _NO_STORE,
    errno.ENOTDIR: _NO_STORE,
    errno.EACCES: "Give yourself the permission to read it",
    errno.EMFILE: "Raise the limit on open files (ulimit -n)",
    errno.ENFILE: "Raise the limit on open files (sysctl fs.file-max)",
    errno.ENOMEM: "Free memory, or lower cache_bytes",
}
# The drive cannot be reached, or is another one by now: nothing is known to be damaged. csrc/samples/feed.cpp
# has the same.
LOST = (errno.ETIMEDOUT, errno.ECONNRESET, errno.ESTALE, errno.ENODEV, errno.EBADF)
CLOSED = "the store was closed: mount it again"
_LEAVE_OUT = "`penstock samples verify` names all that is damaged; on_damage='skip' leaves it out"


class Failure(NamedTuple):
    """What C++ says of a read that failed.

    kind         "read", "checksum", "timeout", "directory" or "closed"
    partition    whose sample it is
    data_file    of the partition: which data file
    offset       in that file
    size_bytes   that were to be read
    sample       its index, -1 where there are several
    error_number errno of "read"
    """

    kind: str
    partition: int
    data_file: int
    offset: int
    size_bytes: int
    sample: int
    error_number: int


def cannot_open(path: str | Path, error: OSError) -> SampleError:
    """The store, or its file, at ``path`` could not be opened."""
    remedy = _REMEDIES.get(error.errno or 0, _DISK)
    failure = SampleError(f"{path} cannot be opened: {error.strerror or error}. {remedy}")
    return with_errno(failure, error.errno)


def from_target(error: TargetError, remedy: str = "") -> SampleError:
    """A drive of another machine could not be used."""
    return with_errno(SampleError(f"{error}. {remedy}" if remedy else str(error)), error.errno)


def disk_failure(error_number: int) -> tuple[str, str]:
    """Why a read of a file has failed, and what to do."""
    reason = os.strerror(error_number) if error_number else "the file ends there"
    return reason, _REMEDIES.get(error_number, _DISK)


def cannot_read(
    failure: Failure, place: Place, chunk_bytes: int, whose: str, timeout_s: float
) -> SampleError:
    """Samples of the store at ``place`` could not be read. ``whose``: the sample, with its name."""
    kind, offset = failure.kind, failure.offset
    path = place.path_of(data_file_name(failure.data_file))
    where = f"byte {offset} of {path} (chunk {offset // chunk_bytes}, {failure.size_bytes} bytes)"
    if kind == "closed":
        return SampleError(CLOSED)
    if kind == "checksum":
        text = f"{whose} is damaged: the checksum at {where} is wrong. {AGAIN}; {_LEAVE_OUT}"
    elif kind == "timeout":
        text = (
            f"{timeout_s:g} s passed while waiting for {whose} at {where}. {place.hang_text}, or mount "
            "with a higher timeout_s"
        )
    elif kind == "directory":
        text = f"{place.path_of(DIRECTORY)} gives {whose} a place that cannot be. {AGAIN}"
    else:
        reason, remedy = place.read_failure(failure.error_number)
        text = f"{whose} cannot be read at {where}: {reason}. {remedy}"
        text += "" if failure.error_number in LOST else f"; {_LEAVE_OUT}"
    return with_errno(SampleError(text), failure.error_number or None)
