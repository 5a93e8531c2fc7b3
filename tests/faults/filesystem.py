"""A file system in memory, served over /dev/fuse: calls on it fail as they are told to, and it records them.

Plain calls, O_DIRECT, io_uring and mapped pages all reach it, through the kernel. `Mount` mounts it and
serves it from a process of its own; who uses it must not be that process. It speaks the protocol of
linux/fuse.h, version 7.38, for one mount, and needs neither libfuse nor a compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import heapq
import itertools
import os
import select
import signal
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

MOST_WRITTEN_BYTES = 1 << 20
CAPACITY_BYTES = 1 << 30  # what statfs says
MARK = ".mark-"  # who looks for a file of this name leaves a mark in the record

_IN, _OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
_ATTR, _ENTRY_TIMES = struct.Struct("<6Q10I"), struct.Struct("<4Q2I")
_MNT_FORCE, _MNT_DETACH, _MS_NOSUID, _MS_NODEV = 1, 2, 2, 4
_FATTR_MODE, _FATTR_UID, _FATTR_GID, _FATTR_SIZE = 1, 2, 4, 8
_INIT_FLAGS = 1 << 0 | 1 << 3 | 1 << 5 | 1 << 22  # async reads, O_TRUNC, big writes, many pages
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_PUNCH_HOLE, _KEEP_SIZE = 2, 1

# Operations as the table calls them. What has no name here never fails.
NAMES = {
    1: "lookup", 3: "stat", 4: "setattr", 9: "mkdir", 10: "unlink", 11: "rmdir", 12: "rename", 13: "link",
    14: "open", 15: "read", 16: "write", 17: "statfs", 20: "fsync", 25: "close", 27: "opendir", 28: "readdir",
    30: "fsync folder", 35: "create", 43: "fallocate", 45: "rename", 51: "create",
}  # fmt: skip


class Rule(NamedTuple):
    """Which calls fail, and how.

    operation  one of `operations`
    first      how many calls of it go well before
    count      how many fail then; None: all
    error      the errno of the answer; 0: none
    short      reads and writes do half of what they should
    delay_s    how long the answer takes
    dead       once one has failed, every operation does
    """

    operation: str
    first: int = 0
    count: int | None = 1
    error: int = 0
    short: bool = False
    delay_s: float = 0.0
    dead: bool = False


class Event(NamedTuple):
    """Something that changed the file system, or made changes durable.

    kind   "write", "size", "hole", "sync": of the file `inode`; "sync folder"; "name": folders changed;
           "new": `inode` has come, of the mode `size`; "mark": what `data` says was acknowledged
    names  of "name": (folder, name, inode or None) for each name that became another, in one step
    """

    kind: str
    inode: int = 0
    offset: int = 0
    data: bytes = b""
    size: int = 0
    names: tuple[tuple[int, bytes, int | None], ...] = ()


class Node:
    """A file or a folder."""

    def __init__(self, number: int, mode: int, descriptor: int = -1) -> None:
        self.number, self.mode, self.descriptor = number, mode, descriptor
        self.entries: dict[bytes, Node] | None = {} if stat.S_ISDIR(mode) else None
        self.links, self.uid, self.gid, self.changed_s = 1, os.geteuid(), os.getegid(), time.time()
        self.is_dirty = False  # something was written, and not synced

    def attributes(self) -> bytes:
        size, blocks = 0, 0
        if self.entries is None:
            status = os.fstat(self.descriptor)
            size, blocks = status.st_size, status.st_blocks
        seconds, parts = int(self.changed_s), int(self.changed_s % 1 * 1e9)
        times = (seconds, seconds, seconds), (parts, parts, parts)
        return _ATTR.pack(
            self.number,
            size,
            blocks,
            *times[0],
            *times[1],
            self.mode,
            self.links,
            self.uid,
            self.gid,
            0,
            4096,
            0,
        )


class Server:
    """Answers requests of the kernel, one after the other; those that are slow wait beside."""

    def __init__(self, device: int, control: Connection) -> None:
        self._device, self._control = device, control
        self._numbers = itertools.count(2)
        self.nodes = {1: Node(1, stat.S_IFDIR | 0o755)}
        self.rules: list[Rule] = []
        self.counts: Counter[str] = Counter()
        self.failed, self._dead = 0, None
        self.events: list[Event] | None = None
        self.saved: Any = None
        self._late: list[tuple[float, int, Callable[[], None]]] = []
        self._lateness = itertools.count()
        self._replied = 0

    def serve(self) -> None:
        """Until nobody holds the other end of the control, or the file system is unmounted."""
        while True:
            left = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            ready = select.select([self._device, self._control], [], [], left)[0]
            while self._late and self._late[0][0] <= time.monotonic():
                heapq.heappop(self._late)[2]()
            try:
                if self._control in ready:
                    name, *arguments = self._control.recv()
                    self._control.send(getattr(self, f"do_{name}")(*arguments))
                if self._device in ready:
                    self._answer(os.read(self._device, MOST_WRITTEN_BYTES + (1 << 17)))
            except (EOFError, ConnectionError):
                return
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                if error.errno not in (errno.ENOENT, errno.EINTR):  # else a request that was taken back
                    raise

    # What the control asks for.

    def do_begin(self, rules: list[Rule], record: bool) -> None:
        self.rules, self.events, self.failed, self._dead = rules, [] if record else None, 0, None
        self.counts.clear()

    def do_end(self) -> tuple[dict[str, int], int, list[Event]]:
        """How often each operation was called, how many of these failed, and what was recorded."""
        self.rules, self._dead, events, self.events = [], None, self.events or [], None
        return dict(self.counts), self.failed, events

    def do_late(self) -> int:
        """How many answers wait."""
        return len(self._late)

    def do_save(self) -> dict[int, Any]:
        """Remember how everything is, for `do_restore`. Returns it: as `tree` reads it."""
        self.saved = {}
        for number, node in self.nodes.items():
            if node.entries is not None:
                named: Any = {name: child.number for name, child in node.entries.items()}
            else:
                named = os.pread(node.descriptor, os.fstat(node.descriptor).st_size, 0)
            if node.links:
                self.saved[number] = (node.mode, named)
        return dict(self.saved)

    def do_restore(self) -> None:
        """Make everything as it was, in files of new numbers: whatever is open stays another."""
        self._replace(self.saved)

    def do_clear(self) -> None:
        self._replace({1: (stat.S_IFDIR | 0o755, {})})

    def _replace(self, saved: dict[int, Any]) -> None:
        for node in self.nodes.values():
            if node.descriptor >= 0:
                os.close(node.descriptor)
        self.nodes = {}
        made = {number: self._new(mode, 1 if number == 1 else None) for number, (mode, _) in saved.items()}
        for node in made.values():
            node.links = 0
        made[1].links = 1
        for number, (_, content) in saved.items():
            if isinstance(content, bytes):
                os.pwrite(made[number].descriptor, content, 0)
                continue
            for name, child in content.items():
                entries = made[number].entries
                assert entries is not None
                entries[name] = made[child]
                made[child].links += 1

    # What the kernel asks for.

    def _answer(self, request: bytes) -> None:
        _, opcode, unique, number, *_ = _IN.unpack_from(request)
        body = memoryview(request)[_IN.size :]
        if opcode in (2, 36, 42):  # forget, interrupt: no answer
            return
        name = self._name_of(opcode, number, body)
        rule = None
        if name and not (name == "lookup" and bytes(body).startswith(MARK.encode())):
            rule = next((each for each in self.rules if each.operation == name), None)
            called = self.counts[name]
            self.counts[name] += 1
            if self._dead is not None:
                rule = self._dead
            elif rule and (
                called < rule.first or (rule.count is not None and called >= rule.first + rule.count)
            ):
                rule = None
        if rule is None:
            self._do(opcode, unique, number, body, False)
            return
        self.failed += 1
        self._dead = rule if rule.dead else None
        if rule.delay_s:
            work = (
                (lambda: self._do(opcode, unique, number, body, False))
                if not rule.error
                else (lambda: self._reply(unique, rule.error))
            )
            heapq.heappush(self._late, (time.monotonic() + rule.delay_s, next(self._lateness), work))
        elif rule.error:
            self._reply(unique, rule.error)
        else:
            self._do(opcode, unique, number, body, rule.short)

    def _name_of(self, opcode: int, number: int, body: memoryview) -> str | None:
        name = NAMES.get(opcode)
        if opcode in (15, 16):
            flags = struct.unpack_from("<I", body, 32)[0]
            return f"{name} direct" if flags & os.O_DIRECT else name
        if opcode == 4:
            return "ftruncate" if struct.unpack_from("<I", body)[0] & _FATTR_SIZE else "chmod"
        if opcode == 25 and not self.nodes[number].is_dirty:  # nothing of it can be lost
            return None
        return name

    def _reply(self, unique: int, error: int = 0, data: bytes = b"") -> None:
        with contextlib.suppress(FileNotFoundError):  # who asked is gone
            os.write(self._device, _OUT.pack(_OUT.size + len(data), -error, unique) + data)

    def _do(self, opcode: int, unique: int, number: int, body: memoryview, short: bool) -> None:
        try:
            node = self.nodes.get(number)
            if opcode == 26:
                self._reply(unique, 0, self._init(body))
                return
            work = _WORK.get(opcode)
            if work is None:
                raise OSError(errno.ENOSYS, "not here")
            if node is None:
                raise OSError(errno.ESTALE, "gone")
            self._reply(unique, 0, work(self, node, body, short) or b"")
        except OSError as error:
            self._reply(unique, error.errno or errno.EIO)

    def _init(self, body: memoryview) -> bytes:
        _, _, ahead, flags = struct.unpack_from("<4I", body)
        return struct.pack(
            "<4I2H2I2H8I", 7, 38, ahead, flags & _INIT_FLAGS, 64, 48, MOST_WRITTEN_BYTES, 1,
            MOST_WRITTEN_BYTES // 4096, 0, *(8 * [0]),
        )  # fmt: skip

    def _new(self, mode: int, number: int | None = None) -> Node:
        number = next(self._numbers) if number is None else number
        descriptor = -1 if stat.S_ISDIR(mode) else os.memfd_create(str(number), os.MFD_CLOEXEC)
        node = self.nodes[number] = Node(number, mode, descriptor)
        self._note("new", inode=number, size=mode)
        return node

    def _entry(self, node: Node) -> bytes:
        return _ENTRY_TIMES.pack(node.number, 0, 0, 0, 0, 0) + node.attributes()

    def _note(self, kind: str, **what: Any) -> None:
        if self.events is not None:
            self.events.append(Event(kind, **what))

    def _name(self, *names: tuple[Node, bytes, Node | None]) -> None:
        """Give these names to other nodes, in one step."""
        for folder, name, node in names:
            entries = _entries(folder)
            if (old := entries.pop(name, None)) is not None:
                old.links -= 1
            if node is not None:
                entries[name] = node
                node.links += 1
        self._note(
            "name",
            names=tuple((folder.number, name, node and node.number) for folder, name, node in names),
        )

    def _lookup(self, folder: Node, body: memoryview, short: bool) -> bytes:
        name = _text(body)
        if name.startswith(MARK.encode()):
            self._note("mark", data=name[len(MARK) :])
        return self._entry(_child(folder, name))

    def _stat(self, node: Node, body: memoryview, short: bool) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + node.attributes()

    def _setattr(self, node: Node, body: memoryview, short: bool) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        mode, _, uid, gid = struct.unpack_from("<4I", body, 68)
        if valid & _FATTR_SIZE:
            os.ftruncate(node.descriptor, size)
            self._note("size", inode=node.number, size=size)
        if valid & _FATTR_MODE:
            node.mode = node.mode & ~0o7777 | mode & 0o7777
        node.uid = uid if valid & _FATTR_UID else node.uid
        node.gid = gid if valid & _FATTR_GID else node.gid
        return self._stat(node, body, short)

    def _mkdir(self, folder: Node, body: memoryview, short: bool) -> bytes:
        mode = struct.unpack_from("<I", body)[0]
        return self._entry(self._make(folder, _text(body[8:]), stat.S_IFDIR | mode & 0o7777))

    def _make(self, folder: Node, name: bytes, mode: int) -> Node:
        if name in _entries(folder):
            raise FileExistsError(errno.EEXIST, "")
        node = self._new(mode)
        node.links = 0
        self._name((folder, name, node))
        return node

    def _unlink(self, folder: Node, body: memoryview, short: bool) -> None:
        name = _text(body)
        if _child(folder, name).entries:
            raise OSError(errno.ENOTEMPTY, "")
        self._name((folder, name, None))

    def _rename(self, folder: Node, body: memoryview, short: bool, flags: int = 0, skip: int = 8) -> None:
        target = self.nodes[struct.unpack_from("<Q", body)[0]]
        old, new = bytes(body[skip:]).split(b"\0")[:2]
        node, there = _child(folder, old), _entries(target).get(new)
        if flags & _RENAME_EXCHANGE:
            self._name((folder, old, _child(target, new)), (target, new, node))
            return
        if there is not None and (flags & _RENAME_NOREPLACE or there.entries):
            raise OSError(errno.EEXIST if there.entries is None else errno.ENOTEMPTY, "")
        if there is not node:
            self._name((folder, old, None), (target, new, node))

    def _rename2(self, folder: Node, body: memoryview, short: bool) -> None:
        self._rename(folder, body, short, struct.unpack_from("<I", body, 8)[0], 16)

    def _link(self, folder: Node, body: memoryview, short: bool) -> bytes:
        node, name = self.nodes[struct.unpack_from("<Q", body)[0]], _text(body[8:])
        if name in _entries(folder):
            raise FileExistsError(errno.EEXIST, "")
        self._name((folder, name, node))
        return self._entry(node)

    def _open(self, node: Node, body: memoryview, short: bool) -> bytes:
        if node.entries is None and struct.unpack_from("<I", body)[0] & os.O_TRUNC:
            os.ftruncate(node.descriptor, 0)
            self._note("size", inode=node.number, size=0)
        return _opened(node)

    def _create(self, folder: Node, body: memoryview, short: bool) -> bytes:
        mode, name = struct.unpack_from("<I", body, 4)[0], _text(body[16:])
        node = self._make(folder, name, stat.S_IFREG | mode & 0o7777)
        return self._entry(node) + _opened(node)

    def _create_nameless(self, folder: Node, body: memoryview, short: bool) -> bytes:
        node = self._new(stat.S_IFREG | struct.unpack_from("<I", body, 4)[0] & 0o7777)
        node.links = 0
        return self._entry(node) + _opened(node)

    def _read(self, node: Node, body: memoryview, short: bool) -> bytes:
        offset, size = struct.unpack_from("<QI", body, 8)
        data = os.pread(node.descriptor, size, offset)
        return data[: len(data) // 2 // 512 * 512] if short else data

    def _write(self, node: Node, body: memoryview, short: bool) -> bytes:
        offset, size = struct.unpack_from("<QI", body, 8)
        data = bytes(body[40 : 40 + (max(1, size // 2 // 512 * 512) if short else size)])
        os.pwrite(node.descriptor, data, offset)
        node.changed_s, node.is_dirty = time.time(), True
        self._note("write", inode=node.number, offset=offset, data=data)
        return struct.pack("<II", len(data), 0)

    def _statfs(self, node: Node, body: memoryview, short: bool) -> bytes:
        blocks = CAPACITY_BYTES // 4096
        return struct.pack(
            "<5Q10I", blocks, blocks // 2, blocks // 2, 1 << 20, 1 << 19, 4096, 255, 4096, *(7 * [0])
        )

    def _fsync(self, node: Node, body: memoryview, short: bool) -> None:
        node.is_dirty = False
        self._note("sync" if node.entries is None else "sync folder", inode=node.number)

    def _nothing(self, node: Node, body: memoryview, short: bool) -> None:
        pass

    def _readdir(self, node: Node, body: memoryview, short: bool) -> bytes:
        offset, size = struct.unpack_from("<QI", body, 8)
        found = b""
        names = [(b".", node), (b"..", node), *_entries(node).items()]
        for place, (name, child) in enumerate(names[offset:], offset + 1):
            record = (
                struct.pack("<QQII", child.number, place, len(name), stat.S_IFMT(child.mode) >> 12) + name
            )
            record += bytes(-len(record) % 8)
            if len(found) + len(record) > size:
                break
            found += record
        return found

    def _fallocate(self, node: Node, body: memoryview, short: bool) -> None:
        _, offset, size, mode = struct.unpack_from("<QQQI", body)
        before = os.fstat(node.descriptor).st_size
        if ctypes.CDLL(None, use_errno=True).fallocate(
            node.descriptor, mode, ctypes.c_long(offset), ctypes.c_long(size)
        ):
            raise OSError(ctypes.get_errno(), "")
        if mode & _PUNCH_HOLE:
            self._note("hole", inode=node.number, offset=offset, size=size)
        elif os.fstat(node.descriptor).st_size != before:
            self._note("size", inode=node.number, size=offset + size)


_WORK: dict[int, Callable[[Server, Node, memoryview, bool], bytes | None]] = {
    1: Server._lookup, 3: Server._stat, 4: Server._setattr, 9: Server._mkdir, 10: Server._unlink,
    11: Server._unlink, 12: Server._rename, 13: Server._link, 14: Server._open, 15: Server._read,
    16: Server._write, 17: Server._statfs, 18: Server._nothing, 20: Server._fsync, 25: Server._nothing,
    27: Server._open, 28: Server._readdir, 29: Server._nothing, 30: Server._fsync, 35: Server._create,
    43: Server._fallocate, 45: Server._rename2, 51: Server._create_nameless,
}  # fmt: skip


def _text(body: memoryview) -> bytes:
    return bytes(body).split(b"\0")[0]


def _entries(folder: Node) -> dict[bytes, Node]:
    if folder.entries is None:
        raise NotADirectoryError(errno.ENOTDIR, "")
    return folder.entries


def _child(folder: Node, name: bytes) -> Node:
    if (node := _entries(folder).get(name)) is None:
        raise FileNotFoundError(errno.ENOENT, "")
    return node


def _opened(node: Node) -> bytes:
    return struct.pack("<QII", node.number, 0, 0)


class Mount:
    """The file system at `folder`, and the process that serves it. A context manager."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError where this process may not mount."""
        self.folder = folder
        self._libc = ctypes.CDLL(None, use_errno=True)
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        try:
            options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
            flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
            if self._libc.mount(b"faults", os.fsencode(folder), b"fuse.faults", flags, options.encode()):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), os.fspath(folder))
            self._control, served = Pipe()
            self._process = os.fork()
            if self._process == 0:
                self._control.close()
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                try:
                    Server(device, served).serve()
                finally:
                    os._exit(0)
            served.close()
        finally:
            os.close(device)

    def __enter__(self) -> Mount:
        return self

    def __exit__(self, *_: object) -> None:
        """Whoever still waits for an answer gets an error."""
        self._control.close()
        self._libc.umount2(os.fsencode(self.folder), _MNT_FORCE | _MNT_DETACH)
        os.waitpid(self._process, 0)

    def ask(self, name: str, *arguments: Any) -> Any:
        """What `Server.do_<name>` returns."""
        self._control.send((name, *arguments))
        return self._control.recv()

    def disown(self) -> None:
        """In a forked child: the parent alone controls it."""
        self._control.close()
