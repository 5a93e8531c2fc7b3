"""NVIDIA's direct path (GPUDirect Storage) through kvikio: between the memory of a GPU and the disk, with
no copy in host memory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import os
import sys
import threading
from typing import Any

from penstock.core.log import log_once
from penstock.errors import installing
from penstock.storage.aligned import align_down, align_up
from penstock.storage.transfer import FOR_EVER_S, File, Transfer, TransportUnavailable, move_fully
from penstock.storage.workers import Workers

THREADS = 8
PIECE_BYTES = 4 << 20  # what kvikio itself makes of larger ones

# Less than this kvikio copies through host memory and, where it is odd, through the page cache.
SMALLEST_BYTES = 16 << 10


class GpuDirectTransport(Workers):
    """Satisfies Transport; a transfer's address is a device pointer, of any CUDA device.

    A file that takes no direct I/O, or that cuFile refuses, fails with the errno of its registration;
    `probe` says why. Kernels that make the content of a write, or still use the target of a read, must
    be over: it waits for none but those of the device's default stream, as kvikio does. cuFile's own
    compatibility mode for single files cannot be seen from here: where cufile.json allows it
    (properties.allow_compat_mode), cuFile may copy a file that it cannot reach directly.

    threads       pieces of transfers that are under way at once; kvikio's pool gets as many threads
    piece_bytes   larger transfers are cut into pieces of about this size

    Raises TransportUnavailable where there is no CUDA device, no kvikio, or no direct path.
    """

    methods: tuple[str, ...] = ("gpu-direct",)

    def __init__(self, threads: int = THREADS, piece_bytes: int = PIECE_BYTES) -> None:
        self._files = _RegisteredFiles(_open_kvikio(threads))
        super().__init__(threads, "kvikio", piece_bytes)

    def close(self, timeout_s: float = FOR_EVER_S) -> bool:
        if not super().close(timeout_s):
            return False
        self._files.close()
        return True

    def probe(self, file: File) -> str | None:
        """Why ``file`` cannot be moved to and from the memory of a GPU directly; None where it can."""
        try:
            self._files.registered(file)
        except OSError as error:
            return error.strerror
        return None

    def perform(self, transfer: Transfer, begin: int, end: int) -> int:
        try:
            registered = self._files.registered(transfer.file)
        except OSError as error:
            return error.errno or errno.EIO
        for low, high in _parts(transfer, transfer.offset + begin, transfer.offset + end):
            if error_number := _move(registered, transfer, low, high):
                return error_number
        return 0


def _parts(transfer: Transfer, low: int, high: int) -> list[tuple[int, int]]:
    """The ranges of the file that are moved by one call each.

    Of a block that is shared with others a write may touch its own bytes only. kvikio does so with small
    ranges; cuFile would read, change and write back the whole block.
    """
    if transfer.kind == "read" or transfer.padded or high - low < SMALLEST_BYTES:
        return [(low, high)]
    alignment = transfer.file.alignment_bytes
    inner_low = min(align_up(low, alignment), high)
    inner_high = max(align_down(high, alignment), inner_low)
    parts = [(low, inner_low), (inner_low, inner_high), (inner_high, high)]
    return [part for part in parts if part[0] < part[1]]


def _move(registered: Any, transfer: Transfer, low: int, high: int) -> int:
    """Move the bytes [low, high) of the file; give 0, or an errno."""
    start = registered.pwrite if transfer.kind == "write" else registered.pread
    address = transfer.address + low - transfer.offset

    def move(done: int, size_bytes: int) -> int:
        left_bytes = size_bytes - done
        memory = _DeviceMemory(address + done, left_bytes)
        try:
            # One task: of several, some may still be under way when another has failed.
            future = start(memory, size=left_bytes, file_offset=low + done, task_size=left_bytes)
            moved: int = future.get()  # waits without the GIL
        except Exception as error:
            log_once(f"kvikio failed to {transfer.kind}: {error}")
            number = _error_number(error, errno.EIO)
            # "Operation not permitted" is kvikio's word for every read that fails.
            raise OSError(errno.EIO if number == errno.EPERM else number, str(error)) from error
        return moved

    return move_fully(move, high - low)


class _DeviceMemory:
    """Bytes on a GPU, as others' libraries know them: by CUDA's array interface."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size_bytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


class _RegisteredFiles:
    """Files registered with cuFile, each once for as long as its descriptor is open."""

    def __init__(self, kvikio: Any) -> None:
        self._kvikio = kvikio
        # By descriptor, whose number may become another's: which file it is, and its CuFile or an error.
        self._entries: dict[int, tuple[tuple[int, int], Any]] = {}
        self._lock = threading.Lock()

    def registered(self, file: File) -> Any:
        """The CuFile of ``file``. Raises OSError, whose strerror says more than its errno."""
        descriptor = file.direct if file.direct >= 0 else file.buffered
        identity = _identity(descriptor)
        with self._lock:
            known, registered = self._entries.get(descriptor, (None, None))
            if known != identity:
                self._drop_closed()
                registered = self._register(descriptor)
                self._entries[descriptor] = identity, registered
        if isinstance(registered, OSError):
            raise OSError(*registered.args)
        return registered

    def close(self) -> None:
        with self._lock:
            self._entries.clear()

    def _register(self, descriptor: int) -> Any:
        written = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        try:
            # Left to itself, kvikio falls back to copies through the host without a word. The path leads
            # to the open file, whether or not it still has a name.
            with _configuring, self._kvikio.defaults.set("compat_mode", self._kvikio.CompatMode.OFF):
                return self._kvikio.CuFile(f"/proc/self/fd/{descriptor}", "r+" if written else "r")
        except Exception as error:
            number = _error_number(error, errno.EOPNOTSUPP)
            return OSError(number, f"cuFile refuses it: {error}")

    def _drop_closed(self) -> None:
        """Let go of files whose descriptors were closed: they would keep their disk space.

        A piece that still uses one keeps it, and the last one closes it.
        """
        for descriptor, (identity, _) in list(self._entries.items()):
            with contextlib.suppress(OSError):
                if _identity(descriptor) == identity:
                    continue
            del self._entries[descriptor]


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


_configuring = threading.Lock()  # kvikio's settings are the process's


def _open_kvikio(threads: int) -> Any:
    """kvikio, with the driver open. Raises TransportUnavailable."""
    torch = sys.modules.get("torch")  # who has memory on a GPU has imported it
    if torch is None or not torch.cuda.is_available():
        raise TransportUnavailable("there is no CUDA device", expected=True)
    try:
        kvikio = importlib.import_module("kvikio")
        defaults = importlib.import_module("kvikio.defaults")
        driver = importlib.import_module("kvikio.cufile_driver")
    except ModuleNotFoundError as error:
        extra = "gds-cu12" if str(torch.version.cuda).startswith("12.") else "gds"
        reason = f"{error.name} is not installed: {installing(extra)}"
        raise TransportUnavailable(reason, expected=True) from error
    except Exception as error:  # a library of NVIDIA's cannot be loaded
        raise TransportUnavailable(f"kvikio cannot be loaded: {error}") from error
    try:
        if defaults.is_compat_mode_preferred():
            raise TransportUnavailable(
                "kvikio is in compatibility mode, and would copy through host memory: KVIKIO_COMPAT_MODE "
                "asks for it, or libcufile or /run/udev is missing"
            )
        driver.driver_open()  # the process keeps it open, as if by its first use
        if not driver.get("is_gds_available") and driver.get("allow_compat_mode"):
            raise TransportUnavailable(
                "nvidia-fs is not loaded, and cuFile may copy through host memory instead. Load it; or, if "
                "cuFile works without it, set properties.allow_compat_mode to false in cufile.json"
            )
        with _configuring:
            if defaults.get("num_threads") < threads:
                defaults.set("num_threads", threads)
            if defaults.get("gds_threshold") < SMALLEST_BYTES:  # see _parts
                defaults.set("gds_threshold", SMALLEST_BYTES)
    except TransportUnavailable:
        raise
    except Exception as error:  # the driver's, or a kvikio before 25.4
        raise TransportUnavailable(f"kvikio cannot be used: {error}") from error
    return kvikio


def _error_number(error: Exception, otherwise: int) -> int:
    """The errno of a kvikio error, which has the system's error only as text, at its end."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    text = str(error)
    found = [number for number in errno.errorcode if text.endswith(os.strerror(number))]
    return max(found, key=lambda number: len(os.strerror(number)), default=otherwise)
