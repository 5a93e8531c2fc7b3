"""System calls of a process, below libc: those that reach its data are counted, and fail as they are told to.

A filter of seccomp, which all threads and children of the process inherit, stops it in every call but those
that reach no data. Its supervisor, another process, looks at what the call is about, and answers in place of
the kernel, or lets the kernel. What neither list here has is counted too, so that no call is left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import heapq
import itertools
import math
import os
import select
import socket
import struct
import subprocess
import time
from collections import Counter
from pathlib import Path

from tests.faults.filesystem import Rule
from tests.support.nvme_target.process import compiler

# What the arguments of a call are: a descriptor, a path, the folder of the path after it, or another thing.
_ARGUMENTS = {
    "f": "read write pread64 pwrite64 readv writev preadv pwritev preadv2 pwritev2 fstat lseek fsync "
    "fdatasync ftruncate fallocate flock fcntl ioctl close getdents64 fstatfs sync_file_range "
    "fadvise64 readahead fchmod fchown fchdir syncfs fsetxattr fgetxattr connect bind listen accept4 "
    "sendto recvfrom sendmsg recvmsg shutdown setsockopt getsockopt getsockname getpeername "
    "io_uring_enter io_uring_register dup dup3 cachestat",
    "p": "open stat lstat access mkdir rmdir unlink chmod truncate statfs readlink chdir creat getxattr "
    "lgetxattr utime utimes execve",
    "dp": "openat openat2 mkdirat unlinkat newfstatat statx faccessat faccessat2 fchmodat readlinkat "
    "utimensat fchownat mknodat",
    "ff": "copy_file_range sendfile",
    "pp": "rename link",
    ".p": "symlink",
    ".dp": "symlinkat",
    "dpdp": "renameat renameat2 linkat",
    "....f": "mmap",
    "r": "io_uring_setup",
    ".": "socket",
}
_KINDS = {name: kinds for kinds, names in _ARGUMENTS.items() for name in names.split()}
# These are about memory, processes, threads, time, and descriptors of no file.
_BESIDE = (
    "futex futex_waitv set_robust_list get_robust_list rseq set_tid_address membarrier brk mprotect "
    "munmap mremap madvise mincore mlock mlock2 munlock mbind get_mempolicy set_mempolicy pkey_mprotect "
    "memfd_create userfaultfd clone clone3 fork vfork wait4 waitid exit exit_group kill tkill tgkill "
    "arch_prctl prctl prlimit64 getrlimit setrlimit getrusage sysinfo uname getrandom getpid getppid "
    "gettid getuid geteuid getgid getegid getresuid getresgid getgroups getpgrp getpgid getsid setsid "
    "setpgid setpriority getpriority umask capget seccomp pidfd_open pidfd_getfd pidfd_send_signal "
    "rt_sigaction rt_sigprocmask rt_sigreturn rt_sigtimedwait rt_sigsuspend rt_sigqueueinfo sigaltstack "
    "restart_syscall sched_yield sched_getaffinity sched_setaffinity sched_getparam sched_setscheduler "
    "sched_getscheduler sched_get_priority_max sched_get_priority_min getcpu clock_gettime clock_getres "
    "clock_nanosleep nanosleep gettimeofday time times setitimer timer_create timer_settime "
    "timer_delete timerfd_create timerfd_settime eventfd2 pipe pipe2 socketpair epoll_create1 epoll_ctl "
    "epoll_wait epoll_pwait poll ppoll select pselect6 close_range inotify_init1 signalfd4 ioprio_set "
    "personality shmget shmat shmdt shmctl pause alarm getcwd "
)
_RING = "anon_inode:[io_uring]"
SENDS = ("sendto", "sendmsg", "write", "writev")

_SECCOMP_MODE_FILTER, _NEW_LISTENER, _WAIT_KILLABLE, _NO_NEW_PRIVS = 1, 8, 32, 38
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_CALL, _ANSWER = struct.Struct("<QIIiIQ6Q"), struct.Struct("<QqiI")
_libc = ctypes.CDLL(None, use_errno=True)


def numbers() -> dict[str, int]:
    """Of system calls, by name. Raises OSError where there is no compiler to ask."""
    if (found := compiler()) is None:
        raise FileNotFoundError(errno.ENOENT, "no C++ compiler knows the numbers of system calls here")
    command = [found, "-E", "-dM", "-include", "sys/syscall.h", "-x", "c", "/dev/null"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    defined = (line.split() for line in text.splitlines() if line.startswith("#define __NR_"))
    return {each[1].removeprefix("__NR_"): int(each[2]) for each in defined if each[2].isdecimal()}


class Filter:
    """Stops a process in calls that may reach data."""

    def __init__(self) -> None:
        """Raises OSError where there can be none."""
        self._numbers = numbers()
        self.names = {number: name for name, number in self._numbers.items()} | {451: "cachestat"}

    def enter(self, control: int) -> None:
        """From here on. The listener's number is written to ``control``, to which more may be written."""
        program = [(0x20, 0, 0, 0)]  # the number of the call
        for name, place, value in (("write", 16, control), ("mmap", 48, 0xFFFFFFFF)):
            program += [(0x15, 0, 4, self._numbers[name]), (0x20, 0, 0, place), (0x15, 0, 1, value)]
            program += [(0x06, 0, 0, _ALLOW), (0x20, 0, 0, 0)]
        for number in (self._numbers[name] for name in _BESIDE.split() if name in self._numbers):
            program += [(0x15, 0, 1, number), (0x06, 0, 0, _ALLOW)]
        program.append((0x06, 0, 0, _NOTIFY))
        packed = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *each) for each in program))
        filters = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(packed))
        _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
        listener = _libc.syscall(
            self._numbers["seccomp"], _SECCOMP_MODE_FILTER, _NEW_LISTENER | _WAIT_KILLABLE, filters
        )
        if listener < 0:
            raise OSError(ctypes.get_errno(), "no filter of seccomp")
        os.write(control, f"{listener}\n".encode())

    def listener(self, process: int, control: int) -> int:
        """That of a process, which has written its number."""
        text = b""
        while not text.endswith(b"\n"):
            if not (part := os.read(control, 1)):
                raise OSError(errno.EPERM, "the process has no filter of seccomp")
            text += part
        return taken(self._numbers, process, int(text))


def taken(numbers: dict[str, int], process: int, descriptor: int) -> int:
    """Another process's descriptor, as one of this process."""
    handle = os.pidfd_open(process)
    try:
        found = int(_libc.syscall(numbers["pidfd_getfd"], handle, descriptor, 0))
    finally:
        os.close(handle)
    if found < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return found


class Supervisor:
    """Answers the calls of one process and its children.

    counts   how often each was made on data: in `folder`, by io_uring, and on sockets of the network
    failed   how many of these failed
    """

    def __init__(self, made: Filter, folder: Path, rules: tuple[Rule, ...]) -> None:
        self._filter, self._folder, self._rules = made, os.fspath(folder), rules
        self.counts: Counter[str] = Counter()
        self.failed, self.listener = 0, -1
        self._networks: set[str] = set()  # sockets
        self._lost: set[str] = set()  # those whose bytes get lost
        self._late: list[tuple[float, int, int]] = []
        self._lateness = itertools.count()

    def enter(self, control: int) -> None:
        self._filter.enter(control)

    def attach(self, process: int, control: int) -> None:
        self.listener = self._filter.listener(process, control)

    def close(self) -> None:
        """Who is still stopped in a call gets an error."""
        os.close(self.listener)

    def wait_s(self) -> float:
        """Until an answer is due, which is late."""
        return max(0.0, self._late[0][0] - time.monotonic()) if self._late else math.inf

    def answer_late(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            self._reply(heapq.heappop(self._late)[2])

    def answer(self) -> None:
        """One call, which was made."""
        request, asked = bytearray(_CALL.size), select.poll()
        asked.register(self.listener, select.POLLIN)
        if not any(events & select.POLLIN for _, events in asked.poll(0)):
            return
        try:
            fcntl.ioctl(self.listener, _RECEIVE, request)
        except FileNotFoundError:  # who asked is gone
            return
        unique, process, _, number, _, _, *arguments = _CALL.unpack(request)
        try:
            self._decide(unique, process, self._filter.names.get(number, f"{number}"), arguments)
        except OSError:  # the process is gone
            self._reply(unique)

    def _decide(self, unique: int, process: int, name: str, arguments: list[int]) -> None:
        found, call = self._data(process, name, arguments), name
        if found is None:
            self._reply(unique)
            return
        if name in ("open", "openat"):
            flags = arguments[_KINDS[name].index("p") + 1]
            name = "create" if flags & os.O_CREAT else "open folder" if flags & os.O_DIRECTORY else "open"
        operation = "? " * (found == "?") + name + " socket" * (found in self._networks)
        operation += " io_uring" * (found == _RING and name == "mmap")
        called = self.counts[operation]
        self.counts[operation] += 1
        rule = next((each for each in self._rules if each.operation == operation), None)
        if (
            rule is None
            or called < rule.first
            or (rule.count is not None and called >= rule.first + rule.count)
        ):
            rule = None
        if rule is None and found not in self._lost:
            self._reply(unique)
            return
        self.failed += 1
        if rule is not None and rule.dead:
            self._lost.add(found)
        if found in self._lost and call in SENDS:
            self._reply(unique, len(self._sent(process, name, arguments)))
        elif rule is None:
            self._reply(unique)
        elif rule.short:
            self._do_half(unique, process, name, arguments)
        elif rule.error:
            self._reply(unique, error=rule.error)
        else:
            heapq.heappush(self._late, (time.monotonic() + rule.delay_s, next(self._lateness), unique))

    def _reply(self, unique: int, value: int | None = None, error: int = 0) -> None:
        flags = _CONTINUE if value is None and not error else 0
        with contextlib.suppress(FileNotFoundError):  # who asked is gone
            fcntl.ioctl(self.listener, _SEND, _ANSWER.pack(unique, value or 0, -error, flags))

    # What a call is about.

    def _data(self, process: int, name: str, arguments: list[int]) -> str | None:
        """The file or the socket, if it is of the data."""
        kinds, where = _KINDS.get(name), ""
        if kinds is None:
            return "?"
        if kinds == "r":
            return _RING
        for kind, argument in zip(kinds, arguments, strict=False):
            if kind in "fd":
                where = self._link(process, argument)
            elif kind == "p" and (path := _text(process, argument)):
                where = os.path.normpath(os.path.join(where or os.readlink(f"/proc/{process}/cwd"), path))
            if kind != "d" and (where.startswith(f"{self._folder}/") or where == self._folder):
                return where
            if kind == "f" and where.startswith("socket:"):
                if name == "connect" and _memory(process, arguments[1], 2) in (b"\x02\x00", b"\x0a\x00"):
                    self._networks.add(where)
                return where if where in self._networks else None
            if where == _RING and name != "close":
                return where
            where = where if kind == "d" else ""
        return None

    @staticmethod
    def _link(process: int, descriptor: int) -> str:
        number = ctypes.c_int(descriptor & 0xFFFFFFFF).value
        try:
            return os.readlink(f"/proc/{process}/" + ("cwd" if number < 0 else f"fd/{number}"))
        except FileNotFoundError:
            return ""

    # Bytes of sockets.

    def _sent(self, process: int, name: str, arguments: list[int]) -> bytes:
        address, count = arguments[1:3]
        if name in ("sendto", "write"):
            return _memory(process, address, count)
        if name == "sendmsg":
            address, count = struct.unpack("<2Q", _memory(process, address + 16, 16))
        pieces = struct.iter_unpack("<2Q", _memory(process, address, 16 * count))
        return b"".join(_memory(process, begin, size) for begin, size in pieces)

    def _do_half(self, unique: int, process: int, name: str, arguments: list[int]) -> None:
        descriptor = taken(self._filter._numbers, process, arguments[0])
        with socket.socket(fileno=descriptor) as connection:
            try:
                if name in SENDS:
                    data = self._sent(process, name, arguments)
                    done = connection.send(
                        data[: max(1, len(data) // 2)], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                    )
                else:
                    data = connection.recv(max(1, min(arguments[2] // 2, 100)), socket.MSG_DONTWAIT)
                    done = len(data)
                    with open(f"/proc/{process}/mem", "r+b", buffering=0) as memory:
                        memory.seek(arguments[1])
                        memory.write(data)
            except OSError as error:
                self._reply(unique, error=error.errno or errno.EIO)
            else:
                self._reply(unique, done)


def _memory(process: int, address: int, size: int) -> bytes:
    with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(size)


def _text(process: int, address: int) -> str:
    """What ends with a zero; it may lie at the end of memory."""
    if not address:
        return ""
    text = b""
    while b"\0" not in text and len(text) < 4096:
        text += _memory(process, address + len(text), min(256, 4096 - (address + len(text)) % 4096))
    return os.fsdecode(text.partition(b"\0")[0])
