"""Checks what penstock needs on this machine: what works, what is missing and costs something, how to fix it.

Nothing is timed: `penstock.probe` does that. Each check uses the part of the library that training uses.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from penstock.errors import DeviceUnavailable, InvalidArgument, SpillError, installing
from penstock.machine import available_bytes, container_available_bytes, container_bytes
from penstock.options import IoOptions
from penstock.runtime import arena, resident
from penstock.units import format_bytes

FINE, COSTS, FAILS = "fine", "costs", "fails"

TRIED_BYTES = 1 << 20  # written to the disk and read back, by each I/O path
TIMEOUT_S = 30.0  # for that
PAGED_BYTES = 8 << 20  # touched, to see huge pages
LITTLE_BYTES = 1 << 30  # of free disk
KERNEL = (6, 1)
OPEN_FILES = 1024
IPC_LOCK = 14  # the bit of the capability to lock any amount of memory

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    state    "fine"; "costs": penstock trains without it; "fails": it cannot train here
    found    what is there
    cost     what is lost, in words; empty where it is fine
    remedy   how to fix it; empty where it is fine
    """

    name: str
    state: str
    found: str
    cost: str = ""
    remedy: str = ""


def examine(spill_dirs: Sequence[Path] = ()) -> list[Finding]:
    """All checks, in the order in which they are printed.

    spill_dirs   directories to spill to; if none is given, the default of `penstock.offload`

    Puts the arena in place of torch's allocator, and writes 1 MiB by each I/O path to an unlinked file.
    """
    directories = list(spill_dirs) or [Path(resident.default_spill_dir())]
    software = [_fine("Python", f"{platform.python_version()} on {platform.machine()}"), _kernel()]
    software.append(_compiled())
    if not usable(software):
        return software
    torch_found, has_gpu = _torch()
    software.append(torch_found)
    if not usable(software):
        return software
    machine = [_memory(), *_limits(), _temporary(bool(spill_dirs))]
    disk = [finding for directory in directories for finding in _directory(directory)]
    if all(finding.state != FAILS for finding in disk):
        disk += _io_paths(directories, has_gpu)
    return [*software, _gpu(), _arena(has_gpu), _huge_pages(), *machine, *disk]


def usable(findings: Sequence[Finding]) -> bool:
    """Whether penstock can train here."""
    return all(finding.state != FAILS for finding in findings)


def _fine(name: str, found: str) -> Finding:
    return Finding(name=name, state=FINE, found=found)


def _costs(name: str, found: str, cost: str, remedy: str) -> Finding:
    return Finding(name=name, state=COSTS, found=found, cost=cost, remedy=remedy)


def _fine_if(fine: bool, name: str, found: str, cost: str, remedy: str) -> Finding:
    return _fine(name, found) if fine else _costs(name, found, cost, remedy)


def _fails(name: str, found: str, remedy: str) -> Finding:
    return Finding(name=name, state=FAILS, found=found, cost="penstock cannot train here", remedy=remedy)


# -- software --------------------------------------------------------------------------------------


def _kernel() -> Finding:
    found = f"{platform.system()} {platform.release()}"
    if platform.system() != "Linux":
        return _fails("kernel", found, "use Linux: the arena and direct I/O need it")
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    cost = "completions of io_uring interrupt the threads that compute"
    remedy = f"run Linux {'.'.join(map(str, KERNEL))} or newer"
    return _fine_if(version >= KERNEL, "kernel", found, cost, remedy)


def _compiled() -> Finding:
    try:
        from penstock import _native
    except ImportError as error:
        return _fails("compiled module", str(error), "install penstock again, with a C++20 compiler")
    return _fine("compiled module", str(_native.__file__))


def _torch() -> tuple[Finding, bool]:
    """What is found, and whether torch sees a GPU."""
    try:
        import torch
    except (ImportError, OSError) as error:
        found = f"it cannot be imported: {error}"
        return _fails("torch", found, "pip install --force-reinstall torch"), False
    from penstock.runtime.requirements import require_torch

    build = "for CPUs only"
    if torch.version.cuda:
        build = f"for CUDA {torch.version.cuda}"
    found = f"{torch.__version__}, {build}"
    try:
        require_torch()
    except DeviceUnavailable as error:
        return _fails("torch", found, str(error)), False
    if torch.version.hip:
        found = f"{torch.__version__}, for ROCm {torch.version.hip}"
        cost = "penstock has never run on ROCm: a model on a GPU may fail"
        return _costs("torch", found, cost, "train on the CPU, or with CUDA"), torch.cuda.is_available()
    return _fine("torch", found), torch.cuda.is_available()


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return _fine("GPU", ", ".join(f"{each.name}, {format_bytes(each.total_memory)}" for each in devices))
    there = [name for name in ("/dev/nvidia0", "/dev/kfd") if os.path.exists(name)]
    if there:
        remedy = "install a build of torch for this GPU (https://pytorch.org/get-started), and its driver"
        return _costs("GPU", f"{there[0]} is there, but torch sees no GPU", "models train on the CPU", remedy)
    return _fine("GPU", "none: models train on the CPU")


def _arena(has_gpu: bool) -> Finding:
    reason = arena.unavailable()
    if reason is None:
        return _fine("arena", "torch's CPU tensors can leave memory, and come back")
    remedy = "use Linux 5.7 or newer, pages of 4096 bytes, and a build of torch with a shared libc10.so"
    if os.environ.get("PENSTOCK_ARENA") == "0":
        remedy = "unset PENSTOCK_ARENA"
    if not has_gpu:
        return _fails("arena", reason, remedy)
    return _costs("arena", reason, "no budget can be kept for a model on the CPU", remedy)


def _huge_pages() -> Finding:
    from penstock.storage.aligned import AlignedBuffer

    buffer = AlignedBuffer(PAGED_BYTES)
    buffer.view()[:] = bytes(PAGED_BYTES)
    huge_bytes = _huge_bytes(buffer.address)
    setting = HUGE_PAGES.read_text().strip() if HUGE_PAGES.exists() else "this kernel has none"
    return _fine_if(
        huge_bytes > 0,
        "huge pages",
        f"{format_bytes(huge_bytes) if huge_bytes else 'none'} of {format_bytes(PAGED_BYTES)} ({setting})",
        "tensors leave and come back in pages of 4 KiB, which takes longer",
        f"on the host, as root: echo madvise > {HUGE_PAGES}",
    )


def _huge_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping that holds an address."""
    holds = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            holds = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif holds and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


# -- the machine -----------------------------------------------------------------------------------


def _memory() -> Finding:
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = f"{format_bytes(machine_bytes)}, {format_bytes(available_bytes())} available"
    limit_bytes, left_bytes = container_bytes(), container_available_bytes()
    if limit_bytes is None or left_bytes is None or limit_bytes >= machine_bytes:
        return _fine("memory", f"{found}; no control group limits it")
    # The budget, Python and torch have to fit in it together.
    allowed = (
        f"control groups allow {format_bytes(limit_bytes)}, of which {format_bytes(left_bytes)} are left"
    )
    return _fine("memory", f"{found}; {allowed} for tensors and everything else in the process")


def _limits() -> list[Finding]:
    import resource

    from penstock.storage import native

    locked_bytes, files, address_bytes = (
        resource.getrlimit(kind)[0]
        for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE, resource.RLIMIT_AS)
    )
    staging_bytes = native.SLOTS * native.SLOT_BYTES
    endless = resource.RLIM_INFINITY
    little = locked_bytes != endless and locked_bytes < staging_bytes and not _may_lock()
    few = files != endless and files < OPEN_FILES
    findings = [
        _fine_if(
            not little,
            "locked memory",
            "no limit" if locked_bytes == endless else format_bytes(locked_bytes) + " (ulimit -l)" * little,
            "io_uring pins its staging buffers again for each transfer",
            f"ulimit -l {staging_bytes >> 10}, or docker run --ulimit memlock={staging_bytes}",
        ),
        _fine_if(
            not few,
            "open files",
            "no limit" if files == endless else str(files) + " (ulimit -n)" * few,
            "sample stores of many data files or partitions cannot be opened",
            f"ulimit -n {OPEN_FILES}",
        ),
    ]
    if address_bytes != endless:
        cost = "the arena has half of it, in which what is away keeps its addresses, too"
        found = f"{format_bytes(address_bytes)} (ulimit -v)"
        findings.append(_costs("address space", found, cost, "ulimit -v unlimited"))
    return findings


def _may_lock() -> bool:
    """Whether this process may lock any amount of memory."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> IPC_LOCK & 1)


def _temporary(has_spill_dir: bool) -> Finding:
    directory = tempfile.gettempdir()
    if not resident.is_in_memory(directory):
        return _fine("temporary files", f"{directory}, on a disk")
    if has_spill_dir or not resident.is_in_memory(resident.default_spill_dir()):
        instead = "to the directory given" if has_spill_dir else f"to {resident.default_spill_dir()}"
        return _fine("temporary files", f"{directory} is in RAM: tensors are spilled {instead}")
    return _costs(
        "temporary files",
        f"{directory} is in RAM, and /var/tmp cannot be written to",
        "tensors that leave memory would stay in it",
        "set TMPDIR, or give a spill_dir, on a local disk",
    )


# -- the disk --------------------------------------------------------------------------------------


def _directory(directory: Path) -> list[Finding]:
    from penstock.storage.costs import disk_kind
    from penstock.storage.region import SpillFile

    try:
        file = SpillFile(directory)
    except SpillError as error:
        remedy = "give --spill-dir a directory on a local disk that you may write to"
        return [_fails("spill directory", str(error).partition(". ")[0], remedy)]
    with contextlib.closing(file):
        direct, free_bytes = file.direct, file.free_bytes()
    return [
        _fine_if(
            not resident.is_in_memory(directory),
            "spill directory",
            f"{directory}: {disk_kind(directory)}",
            "tensors that leave the device stay in RAM, which a budget is to keep free",
            "give one on a local disk (ext4, xfs)",
        ),
        _fine_if(
            direct,
            "direct I/O",
            "past the page cache" if direct else f"refused: {file.refusal}",
            "what is spilled passes through the page cache, too, which takes memory and time",
            "give a spill_dir on a local disk (ext4, xfs)",
        ),
        _fine_if(
            free_bytes >= LITTLE_BYTES,
            "disk space",
            f"{format_bytes(free_bytes)} free",
            "plans that move more have no place for it",
            "free some, or give another spill_dir",
        ),
    ]


def _io_paths(directories: Sequence[Path], has_gpu: bool) -> list[Finding]:
    """Each transport, after 1 MiB has been written and read back by each of its I/O paths."""
    from penstock.storage.paths import TRANSPORTS, IoPaths
    from penstock.storage.spill import SpillSpace

    try:
        paths = IoPaths(media=("disk",))
    except InvalidArgument as error:
        return [_fails("I/O paths", str(error), "let the container make the system calls of io_uring")]
    paths.close()
    failures = {name: _failure(directories, name) for name in paths.paths}
    findings = []
    for transport in TRANSPORTS:
        own = {name: failure for name, failure in failures.items() if name.startswith(f"{transport} ")}
        if broken := {name: failure for name, failure in own.items() if failure}:
            said = "; ".join(f"{name}: {failure}" for name, failure in broken.items())
            findings.append(_fails(transport, said, "check the disk (dmesg, smartctl), or give another"))
        elif own:
            methods = ", ".join(name.partition(" ")[2] for name in own)
            findings.append(_fine(transport, f"{methods}: what was written came back"))
        else:
            findings.append(
                _costs(
                    transport,
                    paths.unavailable.get(transport, "it has no path to the disk"),
                    "calls that block take its place: more processor time for each byte",
                    "let the container make the system calls io_uring_setup, io_uring_enter and "
                    "io_uring_register, and set the sysctl kernel.io_uring_disabled to 0",
                )
            )
    if not has_gpu:
        return [*findings, _fine("cuFile", "not looked for: there is no GPU")]
    with SpillSpace(directories, gpu=True, timeout_s=TIMEOUT_S) as space:
        if space.gpu_direct is not None:
            return [*findings, _fine("cuFile", "between the GPU and the disk, without the host")]
        reason = space.unavailable.get("kvikio", "it moves nothing here")
    cost = "tensors pass through host memory between the GPU and the disk"
    remedy = (
        f"{installing('gds')} (gds-cu12 for a torch of CUDA 12), and load NVIDIA's kernel module nvidia-fs"
    )
    return [*findings, _costs("cuFile", reason, cost, remedy)]


def _failure(directories: Sequence[Path], path: str) -> str | None:
    """What goes wrong where random bytes are written and read back by an I/O path; None if nothing does."""
    from penstock.capture.probe import wait_for
    from penstock.storage.aligned import AlignedBuffer
    from penstock.storage.spill import SpillSpace, Transfer

    written, read = AlignedBuffer(TRIED_BYTES), AlignedBuffer(TRIED_BYTES)
    written.view()[:] = os.urandom(TRIED_BYTES)
    over: SimpleQueue[Transfer] = SimpleQueue()
    try:
        with SpillSpace(directories, IoOptions(paths=path), timeout_s=TIMEOUT_S) as space:
            extent = space.allocate(TRIED_BYTES)
            for move, buffer in ((space.write, written), (space.read, read)):
                move(extent, buffer.address, TRIED_BYTES, buffer, over.put)
                wait_for(space, over, 1)
            space.release(extent)
    except (SpillError, InvalidArgument) as error:
        return str(error)
    return None if written.view() == read.view() else "other bytes came back than were written"
