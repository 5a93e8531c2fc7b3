"""The NVMe/TCP target of the tests, in a process of its own: what it serves, how it errs, what it saw."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SOURCE = Path(__file__).with_name("target.cpp")
FLAGS = ("-std=c++20", "-O2", "-pthread")
DISCOVERY = "nqn.2014-08.org.nvmexpress.discovery"
NQN = "nqn.2026-11.test:s{}"
ANSWER_S = 20.0


class NoCompiler(Exception):
    """The target cannot be compiled here."""


def compiler() -> str | None:
    wanted = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in wanted if name and (found := shutil.which(name))), None)


def compiled() -> Path:
    """The target's program, compiled at most once for each version of its source, whoever asks first."""
    found = compiler()
    if found is None:
        raise NoCompiler("no C++ compiler: set CXX, or install g++")
    folder = Path(tempfile.gettempdir()) / f"penstock-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise NoCompiler(f"{folder} belongs to somebody else")
    name = hashlib.sha256(SOURCE.read_bytes() + " ".join([found, *FLAGS]).encode()).hexdigest()[:16]
    program = folder / f"nvme-target-{name}"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            part = program.with_suffix(".part")
            subprocess.run([found, *FLAGS, str(SOURCE), "-o", str(part)], check=True)
            part.rename(program)
    return program


@dataclass(frozen=True)
class Namespace:
    """Of a subsystem. Its bytes lie in `file`, or in the target's memory."""

    nsid: int = 1
    size_bytes: int = 1 << 20
    block_bytes: int = 512
    file: Path | None = None
    capacity_bytes: int = 0  # how far it can grow

    def argument(self) -> str:
        text = f"nsid={self.nsid},bytes={self.size_bytes},block={self.block_bytes}"
        text += f",capacity={self.capacity_bytes}" if self.capacity_bytes else ""
        return text + (f",file={self.file}" if self.file is not None else "")


@dataclass(frozen=True)
class Subsystem:
    nqn: str = NQN.format(0)
    namespaces: Sequence[Namespace] = (Namespace(),)


class Target:
    """A running target. `options` are those of `kOptionTable` in target.cpp."""

    def __init__(
        self,
        subsystems: Sequence[Subsystem] = (Subsystem(),),
        *,
        options: Mapping[str, int] | None = None,
        address: str = "127.0.0.1",
        port: int = 0,
        threads: int = 1,
        command_prefix: Sequence[str] = (),
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="nvme-target.")
        self._violations = Path(self._folder.name) / "violations.jsonl"
        self.subsystems, self.address, self.port, self._threads = subsystems, address, port, threads
        self._options = dict(options or {})
        self._prefix = list(command_prefix)
        self.start()

    def start(self) -> None:
        """At the same port as before, if it ran before."""
        command = [*self._prefix, str(compiled()), "--address", self.address, "--port", str(self.port)]
        command += ["--threads", str(self._threads), "--violations", str(self._violations)]
        for name, value in self._options.items():
            command += ["--set", f"{name}={value}"]
        for subsystem in self.subsystems:
            command += ["--subsystem", subsystem.nqn]
            for namespace in subsystem.namespaces:
                command += ["--namespace", namespace.argument()]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        word, port = self._line().split()
        assert word == "READY"
        self.port = int(port)

    def _line(self) -> str:
        output = self.process.stdout
        assert output is not None
        text = b""
        while not text.endswith(b"\n"):
            ready, _, _ = select.select([output], [], [], ANSWER_S)
            part = os.read(output.fileno(), 1 << 16) if ready else b""
            if not part:
                raise RuntimeError(f"the target says nothing: exit {self.process.poll()}")
            text += part
        return text.decode()

    def control(self, line: str) -> dict[str, Any]:
        """One line of `control` in target.cpp, and its answer."""
        commands = self.process.stdin
        assert commands is not None
        commands.write(line.encode() + b"\n")
        commands.flush()
        answer: dict[str, Any] = json.loads(self._line())
        if "error" in answer:
            raise ValueError(f"{line}: {answer['error']}")
        return answer

    def set(self, **options: int) -> None:
        for name, value in options.items():
            self.control(f"set {name} {int(value)}")

    def fault(self, kind: str, op: str = "read", **fields: int | str) -> None:
        """From the `after`-th operation `op` on, `count` of them go wrong."""
        self.control(f"fault {kind} op={op} " + " ".join(f"{name}={value}" for name, value in fields.items()))

    def patch(self, what: str, offset: int, data: bytes) -> None:
        """Overwrites bytes of "identify1", "log112", "icresp", "connect", "property0" whenever it is sent."""
        self.control(f"patch {what} {offset} {data.hex()}")

    def clear(self) -> None:
        self.control("clear")

    def land(self) -> int:
        """Carries out the writes that the fault "hold" kept: they came in capsules. How many."""
        return int(self.control("land")["landed"])

    def armed(self) -> int:
        """How many faults have not been met as often as they were asked for."""
        return int(self.control("armed")["armed"])

    def stats(self) -> dict[str, int]:
        return self.control("stats")

    def violations(self) -> list[str]:
        """What the host did wrong."""
        if not self._violations.exists():
            return []
        return [json.loads(line)["violation"] for line in self._violations.read_text().splitlines()]

    def freeze(self) -> None:
        """It falls silent, all of it; the system still accepts connections for it."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        deadline_s = time.monotonic() + ANSWER_S
        while any(
            (task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()
        ):
            if time.monotonic() > deadline_s:
                raise RuntimeError("the target does not stop")
            time.sleep(0.001)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Its connections are reset or closed, and new ones refused, until `start`."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def close(self) -> None:
        if self.process.returncode is None:
            self.kill()
        self._folder.cleanup()

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def random_file(path: Path, size_bytes: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """A file of random bytes, mapped: what is written to a namespace in it shows here. [size_bytes]"""
    data = np.memmap(path, np.uint8, "w+", shape=(size_bytes,))
    data[:] = np.frombuffer(np.random.default_rng(seed).bytes(size_bytes), np.uint8)
    return data
