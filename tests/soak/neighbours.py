"""What lives beside the training of the soak: a small disk that is filled and slowed, memory that is taken,
ranks."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from penstock import samples

ROOT = Path(__file__).parents[2]
BLKIO = Path("/sys/fs/cgroup/blkio")
RANKS = ROOT / "tests" / "distributed" / "restarting.py"


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """ext4 of that size on a loop device. Raises CalledProcessError where this user may not."""
    image, point = folder / "disk.img", folder / "disk"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(size_bytes)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """No room is left on the disk."""
    with tempfile.TemporaryFile(dir=disk) as file:
        left = os.statvfs(disk)
        size_bytes, step = 0, left.f_bavail * left.f_frsize
        while step >= left.f_frsize:
            try:
                os.posix_fallocate(file.fileno(), size_bytes, step)
            except OSError:
                step //= 2
            else:
                size_bytes += step
        yield


class Throttle:
    """Limits what processes get of a disk, by a control group. Raises OSError where there is none."""

    def __init__(self, disk: Path, *processes: int) -> None:
        device = os.stat(disk).st_dev
        self._device = f"{os.major(device)}:{os.minor(device)}"
        self._group = BLKIO / f"penstock-soak-{os.getpid()}"
        self._group.mkdir()
        for process in processes:
            (self._group / "cgroup.procs").write_text(str(process))

    @contextlib.contextmanager
    def slow(self, bytes_per_s: int) -> Iterator[None]:
        self._set(bytes_per_s)
        try:
            yield
        finally:
            self._set(0)

    def _set(self, bytes_per_s: int) -> None:
        for kind in ("read", "write"):
            (self._group / f"blkio.throttle.{kind}_bps_device").write_text(f"{self._device} {bytes_per_s}")

    def close(self) -> None:
        """Once its processes have ended. The system may take a moment to notice."""
        for _ in range(50):
            with contextlib.suppress(OSError):
                self._group.rmdir()
                return
            time.sleep(0.1)


@contextlib.contextmanager
def taken(size_bytes: int) -> Iterator[None]:
    """Memory that is in use by another."""
    with mmap.mmap(-1, size_bytes) as memory:
        for offset in range(0, size_bytes, mmap.PAGESIZE):
            memory[offset] = 1
        yield


class Ranks:
    """Two ranks, of which one is killed and both are restarted, again and again. They check their bits."""

    def __init__(self, folder: Path, pause_s: float) -> None:
        self.rounds, self.failed = 0, list[str]()
        self._folder, self._pause_s, self._over = folder, pause_s, threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        from tests.distributed.restarting import SAMPLES, WIDTH
        from tests.support.ranks import started

        x = np.random.default_rng(0).standard_normal((SAMPLES, WIDTH), dtype=np.float32)
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        while not self._over.is_set():
            (self._folder / "spill").mkdir(parents=True)
            samples.pack({"x": x, "number": np.arange(SAMPLES)}, self._folder / "store")
            done = started(2, RANKS, self._folder, restarts=2)
            left = os.listdir(self._folder / "spill")
            if done.returncode or done.stdout.count("trained in attempt 1") != 2 or left:
                self.failed.append(f"left in spill: {left}\n{done.stdout}{done.stderr}"[-4000:])
            self.rounds += 1
            shutil.rmtree(self._folder)
            self._over.wait(self._pause_s)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
