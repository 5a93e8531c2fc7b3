"""The messages of errors in writing and reading checkpoints."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import CheckpointError, InvalidCheckpoint, with_errno
from penstock.units import format_bytes, format_bytes_up, format_seconds

TIMEOUT_S = 120.0  # the longest wait for a transfer to end: then the disk hangs
AGAIN = "Load another copy, or write the file again."
NAMES_SHOWN = 5
_DISK = "Look at the disk's health (dmesg)"


def damaged(path: str | Path, problem: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(f"{path} is damaged: {problem}. {AGAIN}")


def os_error(error_number: int) -> OSError:
    if error_number == errno.ETIMEDOUT:
        return OSError(error_number, f"The disk hangs: no answer for {format_seconds(TIMEOUT_S)}")
    return OSError(error_number, os.strerror(error_number))


def shown(names: Sequence[str]) -> str:
    """The first few of ``names``, and how many more there are."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def cannot_write(
    path: Path, error: OSError, size_bytes: int, offset: int | None = None, replaced: bool = False
) -> CheckpointError:
    """The checkpoint of ``size_bytes`` at ``path`` could not be written, at the byte ``offset``.

    replaced   it happened after the new file had taken the old one's place
    """
    permission = f"Give yourself the permission to write to it and to {path.parent}, or save somewhere else."
    needed = f"{format_bytes_up(size_bytes)} are needed{_free(path)}."
    remedy = {
        errno.ENOENT: f"Create the directory {path.parent} first.",
        errno.EISDIR: "It is a directory: give the path of a file.",
        **dict.fromkeys(
            (errno.ENOTDIR, errno.EEXIST), f"{path.parent} is not a directory: give a path in one."
        ),
        errno.EINVAL: "Give the path of a regular file, or one where nothing is yet.",
        **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), permission),
        errno.ENOMEM: "Free memory, or save with wait=True, which copies nothing as a whole.",
        errno.ENOSPC: f"{needed} Free space there, or save to another disk.",
        errno.EDQUOT: f"{needed} Raise your quota, or save to another disk.",
        errno.EFBIG: f"{needed} Raise the limit on the size of a file (ulimit -f), or save to another disk.",
    }.get(error.errno or 0, f"{_DISK}, or save to another one.")
    kept = "The file that was there is unchanged." if os.path.isfile(path) else "Nothing was left there."
    if replaced:
        kept = "The new file is in place, but a power failure could bring the old one back."
    return _failed(f"checkpoint {path} cannot be written", offset, "", error, f"{remedy} {kept}")


def cannot_read(
    path: object, error: OSError, offset: int | None = None, tensors: str = ""
) -> CheckpointError:
    """The file at ``path`` could not be read, at the byte ``offset`` of these tensors."""
    remedy = {
        **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "Give the path of a checkpoint that exists."),
        errno.EISDIR: "Give the path of a file.",
        errno.EINVAL: "Give the path of a regular file.",
        errno.EACCES: "Give yourself the permission to read it.",
        errno.ENOMEM: "Free memory, or load with mmap=True.",
    }.get(error.errno or 0, f"{_DISK}, and load another copy if there is one.")
    return _failed(f"checkpoint {path} cannot be read", offset, tensors, error, remedy)


def _failed(what: str, offset: int | None, tensors: str, error: OSError, remedy: str) -> CheckpointError:
    where = "" if offset is None else f" at byte {offset}"
    whose = f" ({tensors})" if tensors else ""
    failed = CheckpointError(f"{what}{where}{whose}: {error.strerror}. {remedy}")
    return with_errno(failed, error.errno)


def _free(path: Path) -> str:
    try:
        status = os.statvfs(path.parent)
    except OSError:
        return ""
    return f", and {format_bytes(status.f_bavail * status.f_frsize)} are free"
