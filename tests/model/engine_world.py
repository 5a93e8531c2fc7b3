"""A world of two storages: the real copy engine, CPU device, recomputation and arena, on one thread.

The disk is a file in memory whose transfers end when the search says so: the first half of a transfer's bytes
moves when it begins, the second when it ends. Wherever the engine waits, or lets its lock go, anything else
may happen.

Actors: the program (kernels, by the clock's protocol, and what schedules order), another thread that touches
memory directly, or keeps it as a collective's does, a foreign allocation that makes the arena evict by
itself, and the disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from penstock import _native
from penstock.errors import BudgetTooSmall, PenstockError, SpillError, SpillSpaceFull
from penstock.runtime.offload_mode import OffloadMode
from penstock.runtime.storages import (
    AWAY,
    COMING,
    DROPPED,
    LEAVING,
    RESIDENT,
    STATES,
    ManagedStorage,
    Storages,
)
from penstock.storage.extents import Extent
from tests.model.explorer import Diverged, Run, Violation
from tests.model.layer import Layer

PAGE = 4096
SIZE = 2 * PAGE
BUDGET = 3 * SIZE
NAMES = ("A", "B")
MOST_CALLS = 5000
MARK = 16  # bytes at the beginning of each page that say which write they are of; the others are zero


@dataclass(frozen=True)
class Config:
    """What may happen, beyond disk transfers that end.

    program   what the program may do
    thread    what another thread may do
    foreign_bytes   that a third thread may allocate, and free; 0: it does not
    extents   that the disk has room for
    errors    transfers that may fail in one run
    inside    actions of the other two threads that may happen in one run while the engine's lock is held,
              before a call on the arena: they need no lock of Python's
    in_flight_bytes   as of CopyEngine
    """

    program: tuple[str, ...]
    thread: tuple[str, ...] = ()
    foreign_bytes: int = 0
    extents: int = 4
    errors: int = 0
    inside: int = 0
    in_flight_bytes: int = SIZE

    @property
    def is_symmetric(self) -> bool:
        actions = {*self.program, *self.thread}
        return actions == {action.translate({65: 66, 66: 65}) for action in actions}


def each(*actions: str) -> tuple[str, ...]:
    return tuple(f"{action} {name}" for action in actions for name in NAMES)


# -- what the engine waits on -------------------------------------------------------------------


class Lock:
    """The engine's: of one thread. Where it is let go in the middle of an action, others act."""

    def __init__(self, world: World) -> None:
        self.world, self.depth = world, 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1

    def acquire(self) -> None:
        self.depth += 1

    def release(self) -> None:
        self.depth -= 1
        if self.depth != 0:
            raise Violation("the lock is let go while it is held twice")
        self.world.others("runs a kernel again")


class Changed:
    """The engine's condition."""

    def __init__(self, world: World) -> None:
        self.world, self.notices = world, 0

    def notify_all(self) -> None:
        self.notices += 1

    def wait(self, timeout: float | None = None) -> bool:
        world, lock, before = self.world, self.world.lock, self.notices
        depth, lock.depth = lock.depth, 0
        world.others("waits", lambda: self.notices > before)
        lock.depth = depth
        return True


class Executor:
    """The device's thread: a task runs, and then says that it is done, when the search says so."""

    def __init__(self, world: World) -> None:
        self.world = world

    def submit(self, call: Callable[..., None], copy: Any) -> None:
        self.world.held.append(Task(self.world, call, copy))

    def shutdown(self, wait: bool = True) -> None:
        if wait and any(isinstance(held, Task) for held in self.world.held):
            raise Violation("the device's thread ends before its tasks")


class Task:
    """Of the device's thread: `begin` does it, `end` tells."""

    def __init__(self, world: World, call: Callable[..., None], copy: Any) -> None:
        self.world, self.call, self.copy, self.tell = world, call, copy, copy.on_end
        copy.on_end = lambda copy: None
        self.name = world.name_of(copy.managed)
        self.label = world.label("task", self.name)
        self.is_over = False

    def end(self, fails: bool) -> None:
        if not self.is_over:
            self.call(self.copy)
            self.is_over = True
        else:
            self.world.held.remove(self)
            self.tell(self.copy)

    def key(self, extents: dict[int, int]) -> Hashable:
        return "task", self.is_over


# -- the disk -----------------------------------------------------------------------------------


class Transfer:
    """Between the disk and memory, as penstock.storage.transfer.Transfer."""

    started_s = finished_s = 0.0
    abandoned = False

    def __init__(
        self, spill: Spill, kind: str, extent: Extent, address: int, size_bytes: int, keep: Any, on_done: Any
    ):
        self.spill, self.kind, self.extent, self.on_done = spill, kind, extent, on_done
        self.address, self.size_bytes, self.keep = address, size_bytes, keep
        self.error: SpillError | None = None
        owners = spill.world.managed.items()
        self.name = next((name for name, one in owners if one.slot and one.slot.extent == extent), "?")
        self.label = spill.world.label(kind, self.name)
        self._move(0)

    def _move(self, half: int) -> None:
        size_bytes = self.size_bytes // 2
        at = half * size_bytes
        memory = (ctypes.c_char * size_bytes).from_address(self.address + at)
        try:
            if self.kind == "write":
                os.pwrite(self.spill.file, memory, self.extent.offset + at)
            else:
                os.preadv(self.spill.file, [memory], self.extent.offset + at)
        except OSError as error:
            self.error = SpillError(error.errno, error.strerror)

    def end(self, fails: bool) -> None:
        world = self.spill.world
        if self.extent not in self.spill.live:
            raise Violation(f"the extent of a {self.kind} of {self.name} was given back before it was over")
        if fails:
            self.error = SpillError(errno.EIO, "the disk of the checker fails")
        else:
            self._move(1)
        if self.kind == "read" and self.error is not None and self.error.errno == errno.EFAULT:
            raise Violation(f"{self.name} is read back to memory that was given back")
        world.held.remove(self)
        self.keep = None
        self.on_done(self)

    def raise_priority(self) -> None:
        pass

    def key(self, extents: dict[int, int]) -> Hashable:
        return self.kind, extents.get(self.extent.offset), self.size_bytes, self.error is not None

    def overlaps(self, address: int, size_bytes: int) -> bool:
        return address < self.address + self.size_bytes and self.address < address + size_bytes


class Spill:
    """The spill space that CpuDevice sees."""

    place_text = "the checker"
    free_bytes = 1 << 40
    has_host = False

    def __init__(self, world: World, files: tuple[int, int], extents: int) -> None:
        self.world, (self.file, self.swap), self.extents = world, files, extents
        self.live: set[Extent] = set()

    def swap_file(self) -> tuple[int, int, int, int]:
        return -1, self.swap, 8 * SIZE, 0

    def allocate(self, size_bytes: int) -> Extent:
        for i in range(self.extents):
            extent = Extent(i * SIZE, SIZE)
            if extent not in self.live:
                self.live.add(extent)
                self.world.copied_dead = [at for at in self.world.copied_dead if at != extent.offset]
                os.pwrite(self.file, bytes(SIZE), extent.offset)  # what the run before left there
                return extent
        raise SpillSpaceFull("the disk of the checker is full")

    def release(self, extent: Extent) -> None:
        if any(isinstance(held, Transfer) and held.extent == extent for held in self.world.held):
            raise Violation("an extent is given back while it is read or written")
        self.live.remove(extent)

    def segments(self, extent: Extent, size_bytes: int) -> list[tuple[int, int, int, int]]:
        return [(self.file, extent.offset, 0, size_bytes)]

    def write(self, extent, address, size_bytes, keep, on_done, *, checksum=False) -> Transfer:
        return self._begin("write", extent, address, size_bytes, keep, on_done)

    def read(self, extent, address, size_bytes, keep, on_done, *, priority=0) -> Transfer:
        return self._begin("read", extent, address, size_bytes, keep, on_done)

    def _begin(self, kind: str, extent: Extent, *rest: Any) -> Transfer:
        for held in self.world.held:
            if isinstance(held, Transfer) and held.extent == extent and "write" in (kind, held.kind):
                raise Violation(f"a {kind} of {held.name} begins while its {held.kind} is under way")
        transfer = Transfer(self, kind, extent, *rest)
        if kind == "write" and transfer.name not in self.world.storage:
            if extent.offset in self.world.copied_dead:
                raise Violation(f"{transfer.name} has died, and is copied again and again")
            self.world.copied_dead.append(extent.offset)
        self.world.held.append(transfer)
        return transfer


# -- the arena, as far as it can be seen from here ------------------------------------------------


@dataclass
class Block:
    """What a block's own state does not tell, followed from call to call. What is followed wrongly hides
    runs, since of states that look alike only one is gone on from; it shows none that are not."""

    copy: str = ""
    event: str = ""
    before: str = "in"  # its state at the last call


def _compute(source: int, target: int) -> None:
    for page in range(0, SIZE, PAGE):
        ctypes.memset(target + page, ~ctypes.string_at(source + page, 1)[0] & 0xFF, MARK)


def _computed(source: torch.Tensor) -> torch.Tensor:
    """The kernel of `World._both`."""
    made = torch.empty(SIZE, dtype=torch.uint8)
    ctypes.memset(made.data_ptr(), 0, SIZE)
    _compute(source.data_ptr(), made.data_ptr())
    return made


class Known(BaseException):
    """The state was met before, and its end was checked."""


class World:
    """One run. Made anew for each; the arena is that of the process."""

    def __init__(self, config: Config, layer: Layer, files: tuple[int, int], run: Run) -> None:
        self.config, self.layer, self.run = config, layer, run
        self.held: list[Any] = []
        self.busy: set[str] = set()
        self.points: list[str] = []
        self.blocks: dict[str, Block] = {}
        self.order: list[str] = []
        self.errors, self.inside = config.errors, config.inside
        self.used: tuple[str, ...] = ()  # by a kernel that runs
        self.named: tuple[str, ...] = ()  # by what the program does
        self.versions = self.calls = 0
        self.kept: set[str] = set()  # held by a thread of a collective, which the engine knows nothing of
        self.copied_dead: list[int] = []  # extents that were written after their storage had died
        self.foreign: torch.UntypedStorage | None = None
        self.storage: dict[str, torch.UntypedStorage] = {}
        self.managed: dict[str, ManagedStorage] = {}  # the latest of each name
        self.met: list[ManagedStorage] = []
        self.truth: dict[str, list[int]] = {}  # of each page, the write that it is of
        self.closed = False
        self.crowded = False  # by foreign memory, since the action began
        self.failed = 0  # errors that the program was told
        layer.native.world = self
        self.spill = Spill(self, files, config.extents)
        layer.cpu.ThreadPoolExecutor = lambda *_: Executor(self)
        self.device = device = layer.cpu.CpuDevice(self.spill, BUDGET)
        self.engine = engine = layer.copy_engine.CopyEngine(
            device, BUDGET, timeout_s=1e9, in_flight_bytes=config.in_flight_bytes
        )
        self.lock = engine.lock = Lock(self)
        self.changed = engine._changed = Changed(self)
        device.engine = engine
        self.storages = device.storages = Storages(device.adopt, self._bury, PAGE, device.first_serial)
        engine.eviction_order = self._eviction_order
        self.recomputation = layer.recompute.Recomputation(device, engine)
        self.clock = clock = SimpleNamespace(
            _engine=engine,
            _device=device,
            recomputation=self.recomputation,
            _interrupts=contextlib.nullcontext(),
            _kernels=SimpleNamespace(schedule=None, excluded_s=0.0),
            _ahead_bytes=0,
        )
        clock._recompute_before = partial(OffloadMode._recompute_before, clock)
        for name in NAMES:
            self._born(name)

    # -- storages ----------------------------------------------------------------------------------

    def _make(self, name: str) -> None:
        """A kernel makes it."""
        with self.lock:
            self.storages.remove_dead()
            _native.arena_touch([])
            self.engine.make_room(SIZE, expected=True)
        self.others("makes")
        self._born(name)
        with self.lock:
            _native.arena_kernel_over()
            self.device.memory.reserved_bytes = 0
            self.engine.end_kernel()

    def _born(self, name: str) -> None:
        storage = torch.UntypedStorage(SIZE)
        self._check_unused(storage.data_ptr(), SIZE)
        self.storage[name] = storage
        ctypes.memset(storage.data_ptr(), 0, SIZE)
        self.blocks[name] = Block()
        self.order = [*(one for one in self.order if one != name), name]
        self._mark(name)
        self.storages.remove_dead()
        managed = self.storages.track(storage, True)
        managed.index = NAMES.index(name)
        self.managed[name] = managed
        self.met.append(managed)

    def _bury(self, managed: ManagedStorage) -> None:
        if managed.recipes:
            self.recomputation.on_storage_freed(managed)
        self.device.on_storage_freed(managed)

    def _eviction_order(self) -> Sequence[ManagedStorage]:
        self.storages.remove_dead()
        return self.storages.by_use()

    def name_of(self, managed: ManagedStorage) -> str:
        return next(name for name, one in self.managed.items() if one is managed)

    def label(self, kind: str, name: str) -> str:
        """Of a transfer, among those that are held: that of a storage that died may still be under way."""
        alike = sum(held.label.startswith(f"{kind} {name}") for held in self.held)
        return f"{kind} {name}" + "'" * alike

    def _mark(self, name: str) -> None:
        """Write to all of it."""
        self.versions += 1
        address = self.storage[name].data_ptr()
        for page in range(2):
            ctypes.memset(address + page * PAGE, self.versions, MARK)
        self.truth[name] = [self.versions] * 2

    def _marks(self, managed: ManagedStorage, address: int) -> list[int]:
        """In a staging area, which is read by the system: it says where there is none."""
        marks = []
        for page in range(2):
            try:
                os.pwrite(self.spill.swap, (ctypes.c_char * 1).from_address(address + page * PAGE), 1 << 30)
            except OSError:
                raise Violation(f"the staging area of {self.name_of(managed)} was given back") from None
            marks.append(os.pread(self.spill.swap, 1, 1 << 30)[0])
        return marks

    def _check_read(self, name: str, who: str) -> None:
        found = ctypes.string_at(self.storage[name].data_ptr(), SIZE)
        expected = b"".join(bytes([version]) * MARK + bytes(PAGE - MARK) for version in self.truth[name])
        if found != expected:
            marks = [found[0], found[PAGE]]
            raise Violation(f"{who} reads {marks} in {name}, where {self.truth[name]} was written last")

    def _check_unused(self, address: int, size_bytes: int) -> None:
        for held in self.held:
            if isinstance(held, Transfer) and held.overlaps(address, size_bytes):
                raise Violation(f"memory that a {held.kind} of {held.name} uses was given to somebody else")

    # -- the arena ---------------------------------------------------------------------------------

    def state_of(self, name: str) -> str:
        """Of the block that the storage is; "" where it is none."""
        storage = self.foreign if name == "F" else self.storage.get(name)
        if storage is None:
            return ""
        address = storage.data_ptr()
        block = _native.arena_block(address)
        return _native.arena_state(address) if block is not None and block[0] == address else ""

    def native(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of the layer's on the arena."""
        self.calls += 1
        if self.calls > MOST_CALLS:
            raise Violation("the engine spins")
        if self.inside:
            self._act_inside(name)
        result = call(*args, **kwargs)
        self._follow(name, args, result)
        return result

    def _follow(self, name: str = "", args: tuple[Any, ...] = (), result: Any = None) -> None:
        if name == "arena_events":
            for block in self.blocks.values():
                block.event = ""
            return
        if name == "arena_stage" and result:
            self._check_unused(result, PAGE)
        at = args[0] if args else 0
        for one, block in self.blocks.items():
            storage = self.foreign if one == "F" else self.storage.get(one)
            if storage is None:
                continue
            state = self.state_of(one)
            before, block.before = block.before, state
            here = at == storage.data_ptr()
            was_in, is_in = before in ("in", "guarded"), state in ("in", "guarded")
            if here and name in ("arena_leave", "arena_leave_packed") and result:
                block.copy = "slot" if name == "arena_leave" else "packed"
            elif here and name == "arena_packed_written" and result:
                block.copy = "slot" if is_in or not args[3] else "packed, slot"
            elif here and name == "arena_drop_packed" and result:
                block.copy = "slot"
            elif here and name == "arena_arrive" and not is_in and result:
                block.copy = "packed, slot"
            elif was_in and not is_in and state != "dropped":  # natively
                block.event, block.copy = "out", block.copy or "swap"
            elif is_in and not was_in and (name in ("", "arena_touch") or not here):
                block.event = "in"
            if is_in and not was_in and block.copy.startswith("packed"):
                block.copy = block.copy[8:]
            if (here and name == "arena_lend" and result) or state in ("in", "dropped"):
                block.copy = ""
            if was_in != is_in or (here and name == "arena_arrive"):
                self.order = [*(other for other in self.order if other != one), one]
        if name == "arena_touch":
            for one in NAMES:
                if one in self.storage and self.storage[one].data_ptr() in at:
                    self.order = [*(other for other in self.order if other != one), one]

    # -- what happens next ---------------------------------------------------------------------------

    def others(self, point: str, ready: Callable[[], bool] | None = None) -> None:
        """Anything else may happen now, until the one who asks goes on: who may, once it is `ready`."""
        if self.lock.depth:
            raise Violation("others act while the lock is held")
        self.points.append(point)
        try:
            while True:
                options = self._others()
                goes_on = ready is None or ready()
                if goes_on:
                    options.append("go on")
                elif not self.held:
                    raise Violation("a wait that nobody ends")
                choice = self.run.pick(options, self.key)
                if choice is None:
                    self._end_if_known()
                    choice = "go on" if goes_on else next(iter(self._ends()))
                if choice == "go on":
                    return
                self.act(choice)
        finally:
            self.points.pop()

    def _others(self) -> list[str]:
        options = list(self._ends())
        if self.errors:
            options += [f"fail {held.label}" for held in self.held if isinstance(held, Transfer)]
        if "thread" not in self.busy:
            options += filter(self._can, self.config.thread)
        if self.config.foreign_bytes:
            options.append("take" if self.foreign is None else "give")
        return options

    def _act_inside(self, point: str) -> None:
        options = [action for action in self.config.thread if self._can(action) and self._is_native(action)]
        if self.config.foreign_bytes:
            options.append("take" if self.foreign is None else "give")
        if not options:
            return
        self.points.append(point)
        choice = self.run.pick([f"{option} inside" for option in options] + ["go on"], self.key)
        self.points.pop()
        if choice is None:
            self._end_if_known()
        elif choice != "go on":
            self.inside -= 1
            verb, *names = choice.removesuffix(" inside").split()
            getattr(self, f"_{verb}")(*names)
            self._follow()

    def _is_native(self, action: str) -> bool:
        """Whether the arena serves it without Python."""
        verb, name = action.split()
        managed = self.managed[name]
        return verb == "look" or (
            verb == "scribble" and not managed.recipes and self.state_of(name) != "dropped"
        )

    def _ends(self) -> dict[str, Transfer | Task]:
        return {f"end {held.label}": held for held in self.held}

    def _can(self, action: str) -> bool:
        verb, *names = action.split()
        alive = all(name in self.storage for name in names)
        if verb == "scribble" and names[0] in self.used:
            return False  # that would be a race of the program's
        if verb in ("look", "scribble"):
            # Somebody who computes what was dropped is waited for.
            return (
                alive
                and not (verb == "look" and self.state_of(names[0]) in ("in", "guarded"))
                and not (self.recomputation._running)
            )
        if verb == "make":  # a disk that is never done does not keep any number of the dead
            return not alive and len(self.held) < len(NAMES)
        if verb == "die" and names[0] in self.named:
            return False
        if verb == "share":
            return alive and not self.storage[names[0]].is_shared()
        if verb in ("keep", "let"):
            return alive and (names[0] in self.kept) == (verb == "let")
        return alive

    def play(self) -> None:
        """The run: as long as the search says what to do; then everything ends as it should."""
        try:
            while True:
                options = self._others()
                if "program" not in self.busy and not self.closed:
                    options += filter(self._can, self.config.program)
                choice = self.run.pick(options, self.key)
                if choice is None:
                    self._end_if_known()
                    break
                self.act(choice)
            self._finish()
        except Known:
            pass
        finally:
            self._leave_nothing()

    def _end_if_known(self) -> None:
        """Of states with the same key one is gone on from: what the key does not hold is looked at in all."""
        if not self.run.known:
            return
        for name, storage in self.storage.items():
            state = self.state_of(name)
            if state in ("out", "staged"):
                with contextlib.suppress(OSError):  # there is no room
                    _native.arena_bring_in(storage.data_ptr())
                    self._check_read(name, "the arena, later,")
            elif state != "dropped":
                self._check_read(name, "the program, later,")
        raise Known

    def act(self, action: str) -> None:
        verb, *names = action.split()
        if verb in ("end", "fail"):
            self.errors -= verb == "fail"
            try:
                self._ends()[action.replace("fail", "end")].end(verb == "fail")
            except Exception as error:
                raise Violation(f"the end of a copy raises {type(error).__name__}: {error}") from error
        elif verb == "take":
            self._take()
        elif verb == "give":
            self._give()
        elif action in self.config.thread:
            self._as("thread", getattr(self, f"_{verb}"), *names)
        else:
            self.named = tuple(names)
            self._as("program", getattr(self, f"_{verb}"), *names)
            self.named = ()
        self._follow()
        self._check()

    def _as(self, actor: str, call: Callable[..., None], *names: str) -> None:
        self.busy.add(actor)
        self.crowded |= self.foreign is not None
        try:
            call(*names)
        except BudgetTooSmall:  # two storages beside what others have
            if not self.crowded:
                raise Violation("what fits is refused") from None
        except SpillSpaceFull:
            if self.config.extents >= len(NAMES):
                raise Violation("the disk is full of what is not needed") from None
        except PenstockError as error:
            if self.errors == self.config.errors:
                raise Violation(f"an error that nothing has caused: {error}") from error
            self.failed += 1
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error
        finally:
            self.busy.discard(actor)
            if not self.busy:
                self.crowded = False

    # -- the program ---------------------------------------------------------------------------------

    def _kernel(self, reads: Sequence[str], writes: Sequence[str], notes: bool = False) -> None:
        """As csrc/runtime/dispatch.cpp."""
        used = [self.managed[name] for name in dict.fromkeys((*reads, *writes))]
        written = [self.managed[name] for name in writes]
        addresses = [managed.address for managed in used if managed.movable and managed.address]

        def over() -> None:
            for managed in used:
                managed.pins -= 1
                self.storages.move_to_end(managed)
            _native.arena_kernel_over()
            self.device.memory.reserved_bytes = 0
            if self.engine.prefetches or self.engine.unpinned_later:
                self.device.end_kernel()
                self.engine.end_kernel()

        with self.lock:
            self.storages.remove_dead()
            for managed in used:
                managed.pins += 1
            try:
                if self.native("arena_touch", _native.arena_touch, (addresses,), {}):
                    self.device.begin_kernel()
                away = any(managed.state > LEAVING for managed in used)
                asks = any(
                    one.clean or one.guarded or one.recipes or one.state != RESIDENT or one.writing_packed
                    for one in written
                )
                if away or asks:
                    OffloadMode._make_ready(self.clock, used, away, written, 0)
            except BaseException:
                over()
                raise
        self.used = (*reads, *writes)
        self.others("runs")
        for name in reads:
            self._touched(name, False)
            self._check_read(name, "a kernel")
        for name in writes:
            self._touched(name, True)
            self._mark(name)
            if notes:
                _compute(self.storage["A"].data_ptr(), self.storage[name].data_ptr())
                self.truth[name] = [~version & 0xFF for version in self.truth["A"]]
        self.others("ends")
        self.used = ()
        with self.lock:
            self.storages.remove_dead()
            if notes:
                operands = [torch.empty(0, dtype=torch.uint8).set_(self.storage[name]) for name in ("A", "B")]
                self.recomputation.keep_recipe(
                    _computed, operands[:1], None, operands[1], None, 0, self.storages.track
                )
            over()

    def _read(self, name: str) -> None:
        self._kernel([name], [])

    def _write(self, name: str) -> None:
        self._kernel([], [name])

    def _pair(self) -> None:
        self._kernel(["A", "B"], [])

    def _both(self) -> None:
        """A kernel makes all of B from A, and it is noted how."""
        self._kernel(["A"], ["B"], notes=True)

    def _evict(self, name: str) -> None:
        self._order(lambda one: self.engine.evict(one, release=False), name)

    def _release(self, name: str) -> None:
        self._order(self.engine.release, name)

    def _pack(self, name: str) -> None:
        self._order(lambda one: self.engine.evict(one, release=True, packs=4), name)

    def _stash(self, name: str) -> None:
        self._order(
            lambda one: self.engine.evict(one, release=True, packs=4, codec="csr", writes=False), name
        )

    def _prefetch(self, name: str) -> None:
        self._order(self.engine.prefetch, name)
        if self.managed[name].freeing_bytes:
            raise Violation(f"{name} is asked back, and to be released")

    def _fetch(self, name: str) -> None:
        self._order(lambda one: self.engine.prefetch(one, keeps_copy=False), name)

    def _drop(self, name: str) -> None:
        self._order(self.recomputation.drop, name)

    def _order(self, call: Callable[[ManagedStorage], None], name: str) -> None:
        """As `OffloadMode._act`."""
        with self.lock:
            self.storages.remove_dead()
            managed = self.managed[name]
            if managed.movable:
                call(managed)

    def _room(self) -> None:
        """A kernel that makes a tensor of one frame, which dies at once."""
        with self.lock:
            try:
                self.engine.make_room(SIZE, expected=True)
            finally:
                _native.arena_kernel_over()
                self.engine.end_kernel()

    def _step(self) -> None:
        with self.lock:
            self.storages.remove_dead()
            self.recomputation.end_step()
            self.engine.begin_step()

    # -- other threads -------------------------------------------------------------------------------

    def _touched(self, name: str, writes: bool) -> None:
        """Memory is accessed: the arena brings it back, or asks who can make it."""
        for _ in range(3):
            state = self.state_of(name)
            if state in ("out", "staged"):
                ctypes.string_at(self.storage[name].data_ptr(), 1)
                self._follow()
            elif state == "dropped" or (writes and state and self.managed[name].recipes):
                if not self.recomputation.serve_fault(self.storage[name].data_ptr(), writes):
                    raise Violation(f"{name} was dropped, and is not made again")
            else:
                return
        raise Violation(f"{name} does not come, however often it is touched: it is {self.state_of(name)}")

    def _look(self, name: str) -> None:
        self._touched(name, False)
        self._check_read(name, "another thread")

    def _scribble(self, name: str) -> None:
        self._touched(name, True)
        self._mark(name)

    def _take(self) -> None:
        def allocate() -> None:
            with contextlib.suppress(RuntimeError):  # there is no room, for what kernels use
                self.foreign = torch.UntypedStorage(self.config.foreign_bytes)

        if "program" in self.busy:  # the arena takes what this thread allocates for a kernel's
            thread = threading.Thread(target=allocate)
            thread.start()
            thread.join()
        else:
            allocate()
        if self.foreign is None:
            return
        self.crowded = bool(self.busy)
        self._check_unused(self.foreign.data_ptr(), self.config.foreign_bytes)
        self.blocks["F"] = Block()
        self.order.append("F")

    def _give(self) -> None:
        self.foreign = None
        if self.blocks.pop("F", None) is not None:
            self.order.remove("F")

    def _keep(self, name: str) -> None:
        """As the thread of a collective that allocates: the program may end the storage first."""
        self._touched(name, True)
        _native.arena_hold(self.storage[name].data_ptr(), +1, True)
        self.kept.add(name)

    def _let(self, name: str) -> None:
        _native.arena_hold(self.storage[name].data_ptr(), -1, False)
        self.kept.remove(name)

    def _share(self, name: str) -> None:
        self.storage[name].share_memory_()

    def _die(self, name: str) -> None:
        del self.storage[name], self.truth[name], self.blocks[name]
        self.kept.discard(name)
        self.order.remove(name)

    # -- the end -------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """From here on nothing else happens: the program ends as run.py does."""
        for name in list(self.kept):
            self._let(name)
        self.foreign = None
        self.blocks.pop("F", None)
        with self.lock:
            self.engine.begin_step()
            self.engine.drain()
            self._check_at_rest()
        self._close()
        stats = _native.arena_stats()
        if stats.out_bytes or stats.swap_used_bytes:
            raise Violation("something is away after the end")
        for name in list(self.storage):
            if self.state_of(name) not in ("in", ""):
                raise Violation(f"{name} is {self.state_of(name)} after the end")
            self._check_read(name, "the program, after the end,")
        self.device._packed.clear()  # as the device goes
        in_arena_bytes = SIZE * sum(self.state_of(name) != "" for name in self.storage)
        if (left_bytes := _native.arena_stats().in_memory_bytes - in_arena_bytes) != 0:
            raise Violation(f"{left_bytes} bytes of memory are nobody's after the end")
        self.storage.clear()
        self.blocks.clear()
        self.storages.remove_dead()
        if self.spill.live:
            raise Violation("an extent is never given back")
        left_bytes = _native.arena_stats().in_memory_bytes
        if left_bytes:
            raise Violation(f"{left_bytes} bytes of the arena are never given back")

    def _close(self) -> None:
        """As `Offload.close`."""
        self.closed = True
        self.recomputation.recompute_all()
        self.engine.drain()
        with self.lock:
            self.storages.remove_dead()
            if not self.device.bring_all_back(self.storages.all()):
                raise Violation("what fits does not come back")
        self.recomputation.close()
        self.device.close()

    def _check_at_rest(self) -> None:
        engine = self.engine
        reserved_bytes = engine.memory.reserved_bytes  # below zero: what left since the last kernel
        if engine._out.total() or engine._in.total() or engine.freeing_bytes or reserved_bytes > 0:
            raise Violation(
                f"at rest {engine._out.total()} bytes leave, {engine._in.total()} come, "
                f"{engine.freeing_bytes} are to be free, {reserved_bytes} are reserved"
            )
        for name, managed in self.managed.items():
            if name in self.storage and (
                managed.kept_alive is not None or managed.queued or managed.state in (1, 3)
            ):
                raise Violation(f"at rest {name} is {STATES[managed.state]}, held or queued")
        if self.device._staging or self.device._pending:
            raise Violation("staging is left")

    def _leave_nothing(self) -> None:
        """The arena is as before, whatever has happened."""
        self.held.clear()
        for managed in self.met:
            managed.kept_alive = managed.slot = None
        self.storage.clear()
        self.foreign = None
        lease = self.device._lease
        for part in (self.device, self.engine, self.recomputation):
            vars(part).clear()
        _native.arena_kernel_over()
        _native.arena_events()
        lease.close()

    # -- invariants ------------------------------------------------------------------------------------

    def _check(self) -> None:
        engine = self.engine
        freeing_bytes = sum(managed.freeing_bytes for managed in self.met)
        if engine.freeing_bytes != freeing_bytes:
            raise Violation(f"{engine.freeing_bytes} bytes are to be free, which are {freeing_bytes}")
        out_bytes = sum(
            held.size_bytes for held in self.held if isinstance(held, Transfer) and held.kind == "write"
        )
        if engine._out.total() != out_bytes:
            raise Violation(f"{engine._out.total()} bytes are said to leave, which are {out_bytes}")
        coming = sum(managed.state == COMING for managed in self.met)
        if not coming * PAGE <= engine._in.total() <= coming * SIZE:
            raise Violation(f"{engine._in.total()} bytes are said to come, of {coming} storages")
        for name in self.storage:
            managed, block = self.managed[name], self.blocks[name]
            if block.event or not managed.movable or managed.address != self.storage[name].data_ptr():
                continue
            state = self.state_of(name)
            is_in = state in ("in", "guarded")
            if (
                managed.state == RESIDENT or (managed.state == LEAVING and not managed.swapped_out)
            ) and not is_in:
                raise Violation(f"{name} is {STATES[managed.state]}, and its memory is {state}")
            if name in self.used and managed.state == AWAY and not managed.swapped_out:
                raise Violation(f"{name} is taken from a kernel that uses it")
            if name in self.kept and not is_in:
                raise Violation(f"{name} is {state} while a thread of a collective has it")
            if managed.state == AWAY and is_in:
                raise Violation(f"{name} is {STATES[managed.state]}, and its memory is {state}")
            if (managed.state == DROPPED) != (state == "dropped"):
                raise Violation(f"{name} is {STATES[managed.state]}, and its memory is {state}")
            if managed.state == RESIDENT and managed.clean and not _native.arena_written(managed.address):
                marks = self._slot_marks(managed)
                if marks is not None and marks != self.truth[name]:
                    raise Violation(f"{name} is clean, with {self.truth[name]}, and its copy is {marks}")

    def _slot_marks(self, managed: ManagedStorage) -> list[int] | None:
        slot = managed.slot
        if slot is None:
            return [-1]
        if slot.packing.packed_bytes:
            return None
        return [os.pread(self.spill.file, 1, slot.extent.offset + page * PAGE)[0] for page in range(2)]

    # -- the state ---------------------------------------------------------------------------------------

    def key(self) -> Hashable:
        """All that what follows depends on, the same for runs that differ in numbers only, or in names."""
        if not self.config.is_symmetric:
            return repr(self._key(NAMES))
        return min(repr(self._key(NAMES)), repr(self._key(NAMES[::-1])))

    def _key(self, names: Sequence[str]) -> Hashable:
        """With the storages named by their places among `names`."""
        marks: dict[int, int] = {}
        extents: dict[int, int] = {}
        called = {self.managed[name]: place for place, name in enumerate(names)}
        place = {name: str(i) for i, name in enumerate(names)}

        def known(numbers: dict[int, int], number: int) -> int:
            return numbers.setdefault(number, len(numbers))

        engine, device, recomputation = self.engine, self.device, self.recomputation
        found: list[Any] = []
        for name in names:
            managed, block = self.managed[name], self.blocks.get(name)
            alive = name in self.storage
            state = self.state_of(name)
            slot = managed.slot
            staging = device._staging.get(managed.key)
            packed = device._packed.get(managed.key)
            recipe = recomputation._recipes.get(managed)
            found.append(
                (
                    (
                        alive,
                        managed.state,
                        managed.clean,
                        managed.guarded,
                        managed.keeps_copy,
                        managed.freeing_bytes,
                    ),
                    (
                        managed.packed_bytes,
                        managed.writing_packed,
                        managed.copy_invalid,
                        managed.queued,
                        managed.movable,
                    ),
                    (
                        managed.swapped_out,
                        managed.reports_freed,
                        managed.pins,
                        managed.recipes,
                        managed.kept_alive is not None,
                    ),
                    slot and (known(extents, slot.extent.offset), slot.packing.packed_bytes),
                    slot and [known(marks, mark) for mark in self._slot_marks(managed) or ()],
                    staging
                    and (staging[1] or [known(marks, mark) for mark in self._marks(managed, staging[0])]),
                    packed and (packed.address != 0, packed.packing.packed_bytes),
                    managed.key in device._pending,
                    recipe and len(recipe.held),
                    managed in recomputation._running,
                    alive and [known(marks, mark) for mark in self.truth[name]],
                    alive and (state, bool(state) and _native.arena_written(self.storage[name].data_ptr())),
                    block and (block.copy, block.event),
                )
            )
        stats = _native.arena_stats()
        return (
            found,
            [(place.get(held.name), held.key(extents)) for held in self.held],
            [
                [called.get(managed) for managed in queue]
                for queue in (engine._evictions, engine.prefetches, engine.unpinned_later)
            ],
            (engine._out.total(), engine._in.total(), engine.freeing_bytes, engine.memory.reserved_bytes),
            (
                engine._error is not None,
                self.errors,
                self.inside,
                self.closed,
                [place[name] for name in self.used],
                sorted(place[name] for name in self.kept),
                [known(extents, offset) for offset in self.copied_dead],
            ),
            (stats.in_memory_bytes, stats.swap_used_bytes, stats.out_bytes),
            (
                self.foreign is not None,
                self.crowded,
                self.state_of("F"),
                [place.get(name) for name in self.order],
            ),
            self.points,
            self._frames(called, place) if self.points else (),
        )

    def _frames(self, called: dict[ManagedStorage, int], place: dict[str, str]) -> list[Any]:
        """Where those are who wait, and what they know."""
        found = []
        frame = sys._getframe(3)
        while frame is not None and frame.f_code is not World.play.__code__:
            code = frame.f_code
            if code.co_filename != __file__ or code.co_name in ("_kernel", "_touched"):
                known: list[Any] = []
                for name, value in frame.f_locals.items():
                    if name == "before" and code.co_name == "_wait_for_copy":
                        known.append(self.engine._completions - value)
                    elif name == "name":
                        known.append(place.get(value))
                    elif isinstance(value, ManagedStorage):
                        known.append((name, called.get(value)))
                    elif isinstance(value, int) and abs(value) < 1 << 30 and name != "completions":
                        known.append((name, value))
                    elif isinstance(value, list) and value and isinstance(value[0], ManagedStorage):
                        known.append((name, [called.get(one) for one in value]))
                found.append((code.co_name, frame.f_lasti, known))
            frame = frame.f_back
        return found


class Checker:
    """Runs worlds of one configuration, for a search."""

    def __init__(self, config: Config, layer: Layer | None = None) -> None:
        self.config = config
        self.layer = layer or Layer()
        problem = self.layer.arena.unavailable()
        assert problem is None, problem
        self.files = os.memfd_create("extents"), os.memfd_create("swap")
        self._outer = self.layer.arena.activate(
            0
        )  # the last lease to be closed gives all memory back, which takes long

    def __call__(self, run: Run) -> None:
        try:
            World(self.config, self.layer, self.files, run).play()
        except (Violation, Diverged) as ended:  # what it tells of holds storages
            error: BaseException | None = ended
            while error is not None:
                traceback.clear_frames(error.__traceback__)
                error = error.__cause__ or error.__context__
            raise
        finally:
            assert not _native.arena_stats().in_use_bytes, "the checker itself leaves memory behind"

    def __enter__(self) -> Checker:
        return self

    def __exit__(self, *_: object) -> None:
        self._outer.close()
        for file in self.files:
            os.close(file)
