"""The copy engine over all interleavings of what a program does with what copies do.

Whatever the order: every state is legal, every byte is kept, the budget holds, the counters add up, and
every wait ends.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.errors import BudgetTooSmall, PenstockError, SpillError
from penstock.runtime.copy_engine import CopyEngine
from penstock.runtime.storages import AWAY, COMING, LEAVING, RESIDENT, ManagedStorage, Storages
from tests.support.scripted import ScriptedDevice, content, fill, is_packed, packed_size

BUDGET = 1000
PIECE = 100


class Program(RuleBasedStateMachine):
    """What a program and its copies do, one after the other, in any order."""

    trouble = 0.0

    @initialize(
        seed=st.integers(0, 1 << 30),
        anywhere=st.booleans(),
        at_once=st.sampled_from([0.0, 0.3]),
        host_slots=st.sampled_from([0, 2]),
    )
    def begin(self, seed: int, anywhere: bool, at_once: float, host_slots: int) -> None:
        self.device = ScriptedDevice(seed, anywhere=anywhere, at_once=at_once, host_slots=host_slots)
        self.engine = CopyEngine(self.device, BUDGET, timeout_s=5.0, in_flight_bytes=3 * PIECE)
        self.device.engine = self.engine
        self.storages = Storages(lambda *_: True, self._buried, 1)
        self.engine.eviction_order = self.storages.by_use
        self.alive: dict[int, torch.UntypedStorage] = {}  # by number
        self.managed: dict[int, ManagedStorage] = {}
        self.expected: dict[int, bytes] = {}
        self.numbers = itertools.count()
        self.values = itertools.count(1)

    def _buried(self, managed: ManagedStorage) -> None:
        if managed.state != AWAY:
            self.device.live.pop(managed.key, None)
        self.device.drop_packed(managed)
        if managed.slot is not None:
            self.device.free_slot(managed, managed.slot)
            managed.slot = None

    @contextlib.contextmanager
    def _troubled(self, least_bytes: int = 0) -> Iterator[None]:
        """Where something else went wrong the engine may raise; the program goes on with its next step."""
        self.device.trouble = self.trouble
        self.device.questions = 0
        try:
            yield
        except PenstockError as error:
            if isinstance(error, BudgetTooSmall):
                assert least_bytes > BUDGET or self.trouble, "it was refused, and could have been"
            elif not self.trouble:
                raise
            self.engine.begin_step()
        finally:
            self.device.trouble = 0.0

    def _pick(self, which: int) -> int | None:
        numbers = sorted(self.alive)
        return numbers[which % len(numbers)] if numbers else None

    # -- the program -----------------------------------------------------------------------------

    @rule(size=st.integers(1, 4))
    def make(self, size: int) -> None:
        with self._troubled(), self.device.serving(self.engine):
            try:
                self.engine.make_room(size * PIECE)
                storage = torch.UntypedStorage(size * PIECE)
                number = next(self.numbers)
                self.expected[number] = next(self.values).to_bytes(4, "little") * (size * PIECE // 4)
                fill(storage, self.expected[number])
                self.storages.remove_dead()
                managed = self.storages.track(storage, True)
                self.device.take(managed.key, managed.size_bytes)
                self.alive[number], self.managed[number] = storage, managed
                managed.index = number
            finally:
                self.engine.end_kernel()

    @rule(
        which=st.lists(st.integers(0, 50), min_size=1, max_size=3),
        writes=st.integers(0, 7),
        takes=st.integers(0, 3),
    )
    def kernel(self, which: list[int], writes: int, takes: int) -> None:
        numbers = list(dict.fromkeys(number for one in which if (number := self._pick(one)) is not None))
        used = [self.managed[number] for number in numbers]
        least_bytes = sum(managed.size_bytes for managed in used) + takes * PIECE
        # What is compressed is beside what it is expanded to, until that is done.
        least_bytes += sum(
            packed_size(managed)
            for managed in used
            if managed.packed_bytes or (managed.slot is not None and managed.slot.packed_bytes)
        )
        with self._troubled(least_bytes), self.device.serving(self.engine):
            for managed in used:
                managed.pins += 1
            try:
                if any(managed.state in (AWAY, COMING) for managed in used):
                    self.engine.demand(used)
                written = [number for bit, number in enumerate(numbers) if writes >> bit & 1]
                for number in written:
                    self.engine.will_write(self.managed[number])
                self.engine.make_room(takes * PIECE)
                for number in numbers:
                    assert content(self.alive[number]) == self.expected[number]
                self.device.take(-1, takes * PIECE)
                for number in written:
                    size = self.managed[number].size_bytes
                    self.expected[number] = next(self.values).to_bytes(4, "little") * (size // 4)
                    fill(self.alive[number], self.expected[number])
            finally:
                self.device.live.pop(-1, None)
                for managed in used:
                    managed.pins -= 1
                self.engine.end_kernel()

    @rule(
        which=st.integers(0, 50),
        tier=st.sampled_from([None, "host", "disk"]),
        release=st.booleans(),
        packs=st.sampled_from([0, 4]),
    )
    def evict(self, which: int, tier: str | None, release: bool, packs: int) -> None:
        number = self._pick(which)
        if number is not None:
            with self._troubled(), self.engine.lock:
                self.engine.evict(self.managed[number], tier, release=release, packs=packs)

    @rule(which=st.integers(0, 50))
    def prefetch(self, which: int) -> None:
        number = self._pick(which)
        if number is not None:
            with self._troubled(), self.engine.lock:
                self.engine.prefetch(self.managed[number])

    @rule(which=st.integers(0, 50))
    def die(self, which: int) -> None:
        number = self._pick(which)
        if number is not None:
            del self.alive[number], self.managed[number], self.expected[number]
            gc.collect(0)
            with self.engine.lock:
                self.storages.remove_dead()

    @rule(size=st.integers(1, 10))
    def free(self, size: int) -> None:
        before = sum(self.device.live.values())
        with self._troubled(), self.device.serving(self.engine):
            could = self.engine.evict_and_wait(size * PIECE)
            left = before - sum(self.device.live.values())
            assert could == (left >= size * PIECE or left > 0)

    @rule()
    def drain(self) -> None:
        with self._troubled(), self.device.serving(self.engine):
            self.engine.drain()
            assert self.engine.in_flight_bytes == (0, 0) and not self.device.pending

    # -- copies ----------------------------------------------------------------------------------

    @rule(which=st.integers(0, 50))
    def complete(self, which: int) -> None:
        if self.device.pending:
            self.device.finish(self.device.pending[which % len(self.device.pending)])

    # -- always ----------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "device"):
            return
        copies = {
            id(copy.managed): copy
            for copy in sorted(self.device.pending, key=lambda copy: not copy.out)
            if not (copy.out and is_packed(copy))
        }
        for number, managed in self.managed.items():
            storage, copy = self.alive[number], copies.get(id(managed))
            assert managed.state in (RESIDENT, LEAVING, AWAY, COMING)
            if managed.state in (RESIDENT, LEAVING):
                assert content(storage) == self.expected[number]
                assert copy is None or copy.out
                assert not managed.clean or self.device.slots[managed.slot] == self.expected[number]
            else:
                packed = self.device.packed.get(managed.key) or self.device.slots[managed.slot]
                assert packed == self.expected[number]
                assert (managed.state == COMING) == (copy is not None)
                is_whole = copy is not None and not is_packed(copy)
                assert storage.nbytes() == (managed.size_bytes if is_whole else 0)
            assert not managed.clean or self.device.slots[managed.slot] == self.expected[number]

    @invariant()
    def counters_add_up(self) -> None:
        if not hasattr(self, "device"):
            return
        out = sum(copy.size_bytes for copy in self.device.pending if copy.out)
        into = sum(copy.size_bytes for copy in self.device.pending if not copy.out)
        assert self.engine.in_flight_bytes == (out, into)
        leaving = {
            id(m): m for m in [*self.managed.values(), *(copy.managed for copy in self.device.pending)]
        }
        assert sum(m.freeing_bytes for m in leaving.values()) <= self.engine.freeing_bytes
        assert all(m.state == LEAVING or m.writing_packed for m in leaving.values() if m.freeing_bytes)

    @invariant()
    def the_budget_holds(self) -> None:
        if hasattr(self, "device"):
            assert self.device.peak_bytes <= BUDGET

    def teardown(self) -> None:
        """Every wait ends, and whatever left comes back."""
        if not hasattr(self, "device"):
            return
        with self.device.serving(self.engine):
            self.engine.drain()
        self.engine.begin_step()
        assert self.engine.freeing_bytes == 0
        for number, managed in self.managed.items():
            with self.device.serving(self.engine):
                managed.pins += 1
                self.engine.demand([managed])
                managed.pins -= 1
                self.engine.end_kernel()
            assert content(self.alive[number]) == self.expected[number]
        self.alive.clear()
        self.managed.clear()
        gc.collect()  # errors that were raised hold what their frames held
        with self.engine.lock:
            self.storages.remove_dead()
        assert not self.device.slots and not self.device.live and not self.device.packed


class FailingProgram(Program):
    """The same, while copies fail, and the disk and the device have no room."""

    trouble = 0.15

    @rule(which=st.integers(0, 50))
    def fail(self, which: int) -> None:
        if self.device.pending:
            copy = self.device.pending[which % len(self.device.pending)]
            self.device.finish(copy, SpillError("Input/output error"))

    @rule()
    def next_step(self) -> None:
        self.engine.begin_step()


_SETTINGS = settings(
    max_examples=25,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestProgram = Program.TestCase
TestProgram.settings = _SETTINGS
TestFailingProgram = FailingProgram.TestCase
TestFailingProgram.settings = _SETTINGS


def test_what_was_coming_packed_has_room_where_it_is_expanded() -> None:
    program = Program()
    program.begin(seed=0, anywhere=False, at_once=0.0, host_slots=0)
    for size in (4, 3):
        program.make(size)
    program.evict(1, None, release=True, packs=4)
    program.drain()
    program.make(4)
    program.prefetch(1)
    program.kernel([1], writes=0, takes=0)
    program.the_budget_holds()
    program.teardown()
