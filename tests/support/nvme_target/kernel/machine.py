"""The Linux kernel's own NVMe/TCP target in an emulated machine: no root on this machine's kernel.

It needs Debian's packages (qemu-system-x86, busybox-static, nvme-cli), and a kernel. They are fetched
where PENSTOCK_INSTALL_KERNEL_TARGET says so (`make test-nvme`); else, or where that fails, `Unavailable` says
what is missing. Emulated, unless PENSTOCK_KERNEL_TARGET_ACCEL is "kvm": for correctness, not for speed.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import platform
import re
import select
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGES = ("qemu-system-x86", "seabios", "busybox-static", "nvme-cli")
PROGRAMS = ("qemu-system-x86_64", "busybox", "nvme", "dpkg-deb", "apt-get", "xz")
KERNEL = "linux-image-cloud-amd64"
MODULES = (
    "virtio_pci",
    "virtio_net",
    "virtio_blk",
    "crc32c_generic",
    "crc32c_intel",
    "nvmet_tcp",
    "nvme_tcp",
)
BOOT_S = 90.0
ANSWER_S = 60.0
NQN = "nqn.2026-11.test:s{}"


class Unavailable(Exception):
    """The emulated machine cannot be had here."""


def _run(command: Sequence[str], **options: object) -> str:
    try:
        done = subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            **options,
        )  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{' '.join(command)}: {getattr(error, 'stdout', None) or error}") from error
    return str(done.stdout)


def _prepared() -> Path:
    """A folder with `vmlinuz` and `initrd.gz`, made once."""
    if platform.machine() != "x86_64":
        raise Unavailable("the emulated machine is written for x86-64")
    install = bool(os.environ.get("PENSTOCK_INSTALL_KERNEL_TARGET"))
    folder = Path(tempfile.gettempdir()) / f"penstock-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(folder / "lock-kernel", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [name for name in PROGRAMS if shutil.which(name) is None]
        if missing and install and os.getuid() == 0 and shutil.which("apt-get"):
            environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            _run(["apt-get", "update", "-qq"])
            wanted = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
            _run(wanted, env=environment)
            missing = [name for name in PROGRAMS if shutil.which(name) is None]
        if missing:
            raise Unavailable(
                f"{', '.join(missing)} not installed: on Debian, apt-get install {' '.join(PACKAGES)}, "
                "or run `make test-nvme` as root"
            )
        sources = b"".join((HERE / name).read_bytes() for name in ("init.sh", "machine.py"))
        made = folder / f"kernel-target-{hashlib.sha256(sources).hexdigest()[:16]}"
        if not (made / "initrd.gz").exists():
            kernel = folder / "kernel"
            if not (kernel / "boot").exists():
                if not install:
                    raise Unavailable("the kernel is not downloaded: run `make test-nvme`")
                _download(kernel)
            made.mkdir(exist_ok=True)
            shutil.copy(next((kernel / "boot").glob("vmlinuz-*")), made / "vmlinuz")
            _write_initrd(kernel, made / "initrd.gz")
        return made


def _download(kernel: Path) -> None:
    found = re.search(r"Depends: (linux-image\S+)", _run(["apt-cache", "depends", KERNEL]))
    if found is None:
        raise Unavailable(f"no package {KERNEL}")
    with tempfile.TemporaryDirectory(dir=kernel.parent) as folder:
        _run(["apt-get", "download", "-qq", found[1]], cwd=folder)
        package = next(Path(folder).glob("*.deb"))
        _run(["dpkg-deb", "-x", str(package), f"{folder}/kernel"])
        os.rename(f"{folder}/kernel", kernel)


def _module_files(kernel: Path) -> list[Path]:
    """Those of MODULES with all that they need, in the order in which they are loaded."""
    root = next((kernel / "lib/modules").iterdir())
    by_name = {
        file.name.split(".ko")[0].replace("-", "_"): file for file in root.rglob("*.ko*") if file.is_file()
    }
    order: list[Path] = []

    def add(name: str) -> None:
        file = by_name.get(name)
        if file is None or file in order:  # built in, or there already
            return
        text = _module_bytes(file)
        needed = re.search(rb"\0depends=([^\0]*)\0", text)
        for other in needed[1].decode().split(",") if needed else []:
            add(other.replace("-", "_"))
        order.append(file)

    for name in MODULES:
        add(name)
    return order


def _module_bytes(file: Path) -> bytes:
    if file.suffix == ".xz":
        return subprocess.run(["xz", "-dc", str(file)], check=True, stdout=subprocess.PIPE).stdout
    return file.read_bytes()


def _libraries(program: str) -> list[str]:
    return re.findall(r"(/\S+) \(0x", _run(["ldd", program]))


def _write_initrd(kernel: Path, path: Path) -> None:
    files: dict[str, bytes] = {"init": (HERE / "init.sh").read_bytes()}
    for name in ("busybox", "nvme"):
        program = shutil.which(name)
        assert program is not None
        files[f"bin/{name}"] = Path(program).read_bytes()
        if name == "nvme":
            for library in _libraries(program):
                files[library.lstrip("/")] = Path(library).read_bytes()
    order = _module_files(kernel)
    for file in order:
        files[f"modules/{file.name.removesuffix('.xz')}"] = _module_bytes(file)
    files["modules/order"] = "\n".join(file.name.removesuffix(".xz") for file in order).encode()
    part = path.with_suffix(".part")
    with gzip.open(part, "wb", compresslevel=1) as out:
        folders = {str(parent) for name in files for parent in Path(name).parents if str(parent) != "."}
        entries = [(name, stat.S_IFDIR | 0o755, b"", 0, 0) for name in sorted({*folders, "dev"})]
        entries += [("dev/console", stat.S_IFCHR | 0o600, b"", 5, 1)]
        entries += [(name, stat.S_IFREG | 0o755, data, 0, 0) for name, data in files.items()]
        entries += [("TRAILER!!!", 0, b"", 0, 0)]
        for number, (name, mode, data, major, minor) in enumerate(entries, 1):
            text = name.encode() + b"\0"
            fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(text), 0)
            head = b"070701" + b"".join(b"%08x" % field for field in fields) + text
            out.write(head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4))
    part.rename(path)


class Machine:
    """A running machine: disk n is namespace 1 of NQN.format(n), behind 127.0.0.1 at `port`.

    `disks`: files, each with its block size in bytes.
    """

    @dataclass(frozen=True)
    class Address:
        port: int
        address: str = "127.0.0.1"

    address = Address.address

    def __init__(self, disks: Iterable[tuple[Path, int]]) -> None:
        self._prepared = _prepared()
        self._folder = tempfile.TemporaryDirectory(prefix="kernel-target.")
        self._disks = list(disks)
        with socket.socket() as free:
            free.bind((self.address, 0))
            self.port: int = free.getsockname()[1]
        self.start()

    def start(self) -> None:
        """At the same port as before, if it ran before."""
        folder = Path(self._folder.name)
        command = ["qemu-system-x86_64"]
        command += [
            "-accel",
            os.environ.get("PENSTOCK_KERNEL_TARGET_ACCEL", "tcg"),
            "-cpu",
            "max",
            "-m",
            "768",
            "-smp",
            "1",
            "-display",
            "none",
            "-no-reboot",
        ]
        command += ["-kernel", str(self._prepared / "vmlinuz"), "-initrd", str(self._prepared / "initrd.gz")]
        command += ["-append", "console=ttyS0 quiet panic=-1", "-serial", f"file:{folder / 'console'}"]
        command += ["-chardev", f"socket,id=control,path={folder / 'control'},server=on,wait=off"]
        command += ["-serial", "chardev:control"]
        command += ["-netdev", f"user,id=net,hostfwd=tcp:{self.address}:{self.port}-:4420"]
        command += ["-device", "virtio-net-pci,netdev=net,romfile="]
        for number, (path, block_bytes) in enumerate(self._disks):
            command += ["-drive", f"file={path},format=raw,if=none,id=disk{number},cache=writeback"]
            blocks = f"logical_block_size={block_bytes},physical_block_size={block_bytes}"
            command += ["-device", f"virtio-blk-pci,drive=disk{number},romfile=,{blocks}"]
        (folder / "control").unlink(missing_ok=True)
        with open(folder / "qemu.log", "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._control = socket.socket(socket.AF_UNIX)
        deadline_s = time.monotonic() + BOOT_S
        while True:
            try:
                self._control.connect(str(folder / "control"))
                break
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline_s:
                    raise Unavailable(f"qemu does not start: {(folder / 'qemu.log').read_text()}") from None
                time.sleep(0.02)
        self._received = b""
        ready = self._until(rb"READY (\d+)\r?\n", BOOT_S)
        assert int(ready[1]) == len(self._disks), ready

    def _until(self, pattern: bytes, timeout_s: float) -> re.Match[bytes]:
        deadline_s = time.monotonic() + timeout_s
        while (found := re.search(pattern, self._received)) is None:
            left_s = deadline_s - time.monotonic()
            ready, _, _ = select.select([self._control], [], [], max(left_s, 0.0))
            try:
                part = self._control.recv(1 << 16) if ready else b""
            except ConnectionError:
                part = b""
            if not part:
                said = [
                    (Path(self._folder.name) / name).read_text(errors="replace")
                    for name in ("qemu.log", "console")
                ]
                raise RuntimeError(f"the machine says nothing more: {self._received!r} {said}")
            self._received += part
        return found

    def run(self, line: str, timeout_s: float = ANSWER_S) -> str:
        """What a line of shell prints within the machine. Raises RuntimeError where it fails."""
        self._received = b""
        self._control.sendall(line.encode() + b"\n")
        ended = self._until(rb"ENDED (\d+)\r?\n", timeout_s)
        text = self._received[: ended.start()].decode(errors="replace").replace("\r\n", "\n")
        if int(ended[1]):
            raise RuntimeError(f"{line}: {text}")
        return text

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._control.close()

    def close(self) -> None:
        if self.process.returncode is None:
            self.kill()
        self._folder.cleanup()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
