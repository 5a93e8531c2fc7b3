"""Host memory in the place of a spill file: a tier of RAM beside the memory that a device budget counts."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform

from penstock._native import Descriptor
from penstock.errors import InvalidArgument, SpillError, SpillSpaceFull, with_errno
from penstock.machine import available_bytes, node_available_bytes
from penstock.storage.aligned import MADV_POPULATE_WRITE, address_of, advise, align_down
from penstock.storage.extents import ALIGNMENT_BYTES
from penstock.storage.files import OpenFile
from penstock.storage.transfer import File, Transfer
from penstock.units import format_bytes, share_bytes

STEP_BYTES = 64 << 20

_MPOL_BIND = 2
_MBIND = {"x86_64": 237, "aarch64": 235}  # the C library has no function for this system call


def host_budget_bytes(budget: int | str, node: int | None) -> int:
    """Bytes of a budget of host memory beside a CPU's own, of this NUMA node; None: of any.

    Raises InvalidArgument where there is no such node, or less memory.
    """
    left_bytes = available_bytes() if node is None else node_available_bytes(node)
    found = share_bytes(budget, left_bytes, left_bytes)
    if found > left_bytes:
        where = "there are" if node is None else f"NUMA node {node} has"
        raise InvalidArgument(
            f"host_budget is {format_bytes(found)}, and {where} {format_bytes(left_bytes)} of memory to be "
            "had: give less"
        )
    return found


class HostMemory:
    """Memory that tensors are copied to, mapped and without a name: it is freed with the process, however
    that ends. In huge pages where the system has them for shared memory.

    The attributes are those of SpillFile. `file.direct` is the address: see CopyTransport. The arena, which
    reads by itself, has the descriptor.

    capacity_bytes   most that it takes from the system, as it is needed
    node             NUMA node that all of it comes from; None: any

    Raises SpillError where the system refuses it.
    """

    direct = True
    refusal = ""
    begin = 0
    quiesce_s = 0.0

    def __init__(self, capacity_bytes: int, node: int | None = None) -> None:
        self.place = "host memory" if node is None else f"NUMA node {node}"
        self.size_bytes = 0
        size_bytes = align_down(capacity_bytes, ALIGNMENT_BYTES)
        descriptor = os.memfd_create("penstock", os.MFD_CLOEXEC)
        self._open = OpenFile(Descriptor.owning(descriptor))
        try:
            os.ftruncate(descriptor, size_bytes)
            self._mapping = mmap.mmap(descriptor, size_bytes)
            self._address = address_of(self._mapping)
            with contextlib.suppress(OSError):  # a kernel without huge pages: small ones serve
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
            if node is not None:
                _bind(self._address, size_bytes, node)
        except OSError as error:
            self._open.close()
            raise SpillError(
                f"{format_bytes(size_bytes)} of {self.place} cannot become a tier: {error.strerror}. "
                "Lower host_budget, or raise the limits of this process (ulimit -v, its cpuset)."
            ) from error
        self.file = File(descriptor, self._address, 1)
        self.handle = descriptor

    def grow_to(self, size_bytes: int, most_bytes: int | None = None) -> None:
        """Take at least so much from the system, and for speed somewhat more, up to ``most_bytes``: its first
        use takes no time then. Raises SpillSpaceFull."""
        if size_bytes <= self.size_bytes:
            return
        ahead = min(size_bytes + STEP_BYTES, len(self._mapping) if most_bytes is None else most_bytes)
        more_bytes = max(ahead, size_bytes) - self.size_bytes
        try:
            error_number = advise(self._address + self.size_bytes, more_bytes, MADV_POPULATE_WRITE)
            if error_number == errno.EINVAL:  # an older kernel: pages are not huge then
                os.posix_fallocate(self.handle, self.size_bytes, more_bytes)
            elif error_number:
                raise OSError(error_number, os.strerror(error_number))
        except OSError as error:
            raise SpillSpaceFull(
                f"{self.place} is full ({error.strerror}): it holds {format_bytes(self.size_bytes)}, and "
                f"{format_bytes(size_bytes - self.size_bytes)} more are needed. Lower host_budget."
            ) from error
        self.size_bytes += more_bytes

    def free_bytes(self) -> int:
        return len(self._mapping) - self.size_bytes

    def failure(self, failed: Transfer) -> SpillError:
        error = SpillError(
            f"the {failed.kind} of {format_bytes(failed.size_bytes)} at offset {failed.offset} of "
            f"{self.place} failed: {os.strerror(failed.error_number)}. Train without host_budget."
        )
        return with_errno(error, failed.error_number)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._mapping.close()
        self._open.close()


def _bind(address: int, size_bytes: int, node: int) -> None:
    """Have the pages of a shared mapping come from that NUMA node alone, whoever touches them first."""
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    words = (ctypes.c_ulong * (node // bits + 1))()
    words[node // bits] = 1 << node % bits
    failed = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_size_t(size_bytes),
        ctypes.c_long(_MPOL_BIND),
        words,
        ctypes.c_ulong(len(words) * bits + 1),  # the kernel leaves out the last one
        ctypes.c_ulong(0),
    )
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
