"""A hard limit of the operating system for the memory of processes: memory control groups, versions 1 and 2.

`ControlGroup` and `swap_file` need root, and raise Unavailable with the reason where they cannot work.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


class Unavailable(Exception):
    """Limits or swap files cannot be made here; says why."""


class ControlGroup:
    """A group of processes whose memory is limited; a context manager. Processes must have ended before.

    path      where processes join it, by their number in cgroup.procs
    version   1 or 2
    """

    def __init__(self, name: str) -> None:
        require_root()
        if (V1 / "memory.limit_in_bytes").exists():
            self.version, parent = 1, V1
        elif (V2 / "cgroup.controllers").exists():
            self.version, parent = 2, V2
            if "memory" not in (V2 / "cgroup.controllers").read_text().split():
                raise Unavailable("the memory controller is not among /sys/fs/cgroup/cgroup.controllers")
            _write(V2 / "cgroup.subtree_control", "+memory")
        else:
            raise Unavailable("no memory control groups are mounted at /sys/fs/cgroup")
        self.path = parent / f"{name}-{os.getpid()}"
        try:
            self.path.mkdir()
        except OSError as error:
            raise Unavailable(f"{self.path} cannot be made: {error.strerror}") from error

    def limit(self, size_bytes: int) -> None:
        """Of all memory of the group, the kernel's own and page cache included; what is above is swapped."""
        _write(self.path / ("memory.limit_in_bytes" if self.version == 1 else "memory.max"), str(size_bytes))

    def unevictable_bytes(self) -> int:
        """What the group holds, without page cache that no process has mapped."""
        numbers = self._numbers()
        if self.version == 1:
            kernel = int((self.path / "memory.kmem.usage_in_bytes").read_text())
            return numbers["rss"] + numbers["mapped_file"] + kernel
        return numbers["anon"] + numbers["file_mapped"] + numbers["kernel"]

    def peak_bytes(self) -> int:
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        return int((self.path / name).read_text())

    def swapped_in_pages(self) -> int:
        """Of anonymous memory, since the group began: pages that were out, and were needed again."""
        return self._numbers().get("workingset_refault_anon", 0)

    def swapped_bytes(self) -> int:
        """That are out now."""
        if self.version == 1:
            return self._numbers().get("swap", 0)
        return int((self.path / "memory.swap.current").read_text())

    def _numbers(self) -> dict[str, int]:
        lines = (self.path / "memory.stat").read_text().splitlines()
        return {name: int(number) for name, number in (line.split() for line in lines)}

    def __enter__(self) -> ControlGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in range(50):  # its processes have ended, and the system takes a moment to notice
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.1)


@contextlib.contextmanager
def swap_file(directory: str, size_bytes: int) -> Iterator[Path]:
    """A swap file of the system in ``directory``, removed afterwards."""
    require_root()
    handle, name = tempfile.mkstemp(prefix="penstock-swap-", dir=directory)
    path = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            zeros = bytes(16 << 20)  # a swap file has no holes, and blocks that were written once are faster
            for _ in range(-(-size_bytes // len(zeros))):
                file.write(zeros)
            os.fsync(file.fileno())
        _run("mkswap", str(path))
        _run("swapon", str(path))
        try:
            yield path
        finally:
            _run("swapoff", str(path))
    finally:
        path.unlink()


def swapped_pages() -> tuple[int, int]:
    """(in, out) of the whole system since it started."""
    numbers = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(numbers["pswpin"]), int(numbers["pswpout"])


def require_root() -> None:
    if os.geteuid() != 0:
        raise Unavailable("limits and swap files of the system need root: run this as root")


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise Unavailable(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{' '.join(command)}: {error.stderr.strip()}") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise Unavailable(f"{path} cannot be set to {text}: {error.strerror}") from error
