"""Memory that the ranks of a process group share. It has no name, and is freed with the last of them."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from penstock.errors import DistributedError
from penstock.units import format_bytes

_MOST_BYTES, _UNUSED = 4096, b"\xc1"  # of what a rank tells; a byte that msgpack never has
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class NotOneMachine(DistributedError):
    """The ranks cannot share memory."""


class SharedSegment:
    """``size_bytes`` of shared memory, zeroed, mapped by all ranks of the group. They make it together.

    memory    the mapping in this process
    pids      of the ranks
    watched   a pidfd of each other rank; -1 for this one

    Raises DistributedError on all ranks where one of them cannot map it.
    """

    def __init__(self, group: dist.ProcessGroup, size_bytes: int) -> None:
        rank = dist.get_rank(group)
        self.watched: list[int] = []
        file, error = -1, ""
        try:
            if rank == 0:
                try:
                    file = _make(size_bytes)
                except OSError as failed:
                    error = (
                        f"{format_bytes(size_bytes)} of shared memory cannot be allocated: {failed.strerror}"
                    )
            found = _gathered((_machine(), os.getpid(), file, error), group)
            _require_one_machine([machine for machine, *_ in found])
            _raise_first([found[0][3]], group)
            self.pids: list[int] = [pid for _, pid, *_ in found]
            try:
                if rank != 0:
                    file = _open(self.pids[0], found[0][2], size_bytes)
                self.memory: mmap.mmap = mmap.mmap(file, size_bytes)
                self.watched = [-1 if pid == os.getpid() else os.pidfd_open(pid) for pid in self.pids]
            except (OSError, DistributedError) as failed:
                error = str(failed)[:1000]
            _raise_first(_gathered(error, group), group)
        except BaseException:
            self.close()
            raise
        finally:
            if file >= 0:
                os.close(file)

    def close(self) -> None:
        """Close the pidfds. The memory is freed when the last reference to `memory` is gone."""
        if hasattr(self, "memory"):
            del self.memory
        for watched in self.watched:
            if watched >= 0:
                with contextlib.suppress(OSError):
                    os.close(watched)
        self.watched = []


def _make(size_bytes: int) -> int:
    """Make a memfd whose size is sealed."""
    file = os.memfd_create("penstock", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(file, 0o600)
        os.posix_fallocate(file, 0, size_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(file)
        raise
    return file


def _open(pid: int, number: int, size_bytes: int) -> int:
    """Open the memfd of another process, and check that it is one of this size."""
    file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        about = os.fstat(file)
        sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        if not sealed or about.st_size != size_bytes or about.st_uid != os.geteuid():
            raise DistributedError(
                f"file {number} of process {pid} is not the shared memory of {size_bytes} bytes that it has "
                "made: do all ranks run the same program, with the same arguments?"
            )
    except BaseException:
        os.close(file)
        raise
    return file


def _machine() -> str:
    """Name of the machine and its namespaces: processes with the same name can open each other's memfds."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


def _require_one_machine(machines: list[str]) -> None:
    count = len(set(machines))
    if count > 1:
        raise NotOneMachine(
            f"host accumulation works among processes of one machine and container, and the {len(machines)} "
            f"ranks of this process group are in {count}: take method='all_reduce', or method='auto', which "
            "chooses it then"
        )


def _gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """All-gather: the value of every rank. It is no pickle, which could run code of another rank's here.

    Raises DistributedError where a rank sends something else.
    """
    device = dist.distributed_c10d._get_object_coll_device(group)
    told = msgspec.msgpack.encode(value)[:_MOST_BYTES].ljust(_MOST_BYTES, _UNUSED)
    own = torch.frombuffer(bytearray(told), dtype=torch.uint8).to(device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    try:
        texts = [bytes(each.tolist()).rstrip(_UNUSED) for each in found]
        return [msgspec.msgpack.decode(text, type=type(value)) for text in texts]
    except msgspec.DecodeError as error:
        raise DistributedError(
            f"a rank sends what penstock does not ({error}): do all ranks run the same program, with the "
            "same version of penstock?"
        ) from error


def _raise_first(errors: list[str], group: dist.ProcessGroup) -> None:
    for rank, error in enumerate(errors):
        if error:
            raise DistributedError(f"rank {dist.get_global_rank(group, rank)}: {error}")
