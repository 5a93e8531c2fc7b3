"""Single situations of the copy engine, each of which once went wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.errors import SpillError
from penstock.runtime.copy_engine import CopyEngine
from penstock.runtime.storages import AWAY, COMING, LEAVING, RESIDENT, ManagedStorage, Storages
from tests.support.scripted import ScriptedDevice, content, packed_size

PIECE = 100


class Bench:
    """Storages of 100 bytes on a device of ``budget`` bytes."""

    def __init__(
        self, budget: int = 10 * PIECE, *, anywhere: bool = False, host_slots: int = 0, **limits: float
    ) -> None:
        self.device = ScriptedDevice(anywhere=anywhere, host_slots=host_slots)
        self.storages = Storages(lambda *_: True, lambda managed: None, 1)
        self.engine = CopyEngine(
            self.device,
            budget,
            self.storages.by_use,
            **limits,  # type: ignore[arg-type]
        )
        self.kept: list[torch.UntypedStorage] = []

    def make(self) -> ManagedStorage:
        storage = torch.UntypedStorage(PIECE)
        storage.fill_(len(self.kept))
        self.kept.append(storage)
        managed = self.storages.track(storage, True)
        self.device.take(managed.key, managed.size_bytes)
        return managed

    def away(self, tier: str | None = None) -> ManagedStorage:
        managed = self.make()
        self.engine.evict(managed, tier, release=True)
        self.device.finish(self.device.pending[-1])
        assert managed.state == AWAY
        return managed


def test_what_stays_queued_when_another_cannot_begin_is_begun_later() -> None:
    bench = Bench(3 * PIECE, in_flight_bytes=PIECE, timeout_s=5.0)
    first, second, third = bench.make(), bench.make(), bench.make()
    for managed in (first, second, third):
        bench.engine.evict(managed, release=True)
    bench.device.trouble = 1.0
    bench.device.finish(bench.device.pending[0])  # the second cannot begin, the third stays queued
    bench.device.trouble = 0.0
    assert (first.state, second.state, third.state) == (AWAY, RESIDENT, LEAVING)
    bench.engine.begin_step()

    with bench.device.serving(bench.engine):
        bench.engine.make_room(2 * PIECE)

    assert third.state == AWAY


def test_what_a_kernel_of_another_thread_may_write_is_not_copied() -> None:
    bench = Bench()
    managed = bench.make()
    managed.pins += 1
    bench.engine.will_write(managed)
    bench.engine.evict(managed, release=True)
    assert managed.state == RESIDENT and not bench.device.pending
    managed.pins -= 1
    bench.engine.evict(managed, release=True)
    assert managed.state == LEAVING and bench.device.pending


def test_prefetches_do_not_take_the_room_that_a_kernel_waits_for() -> None:
    bench = Bench(4 * PIECE, anywhere=True, timeout_s=5.0)
    wanted = [bench.away() for _ in range(2)]
    for _ in range(4):
        bench.make()
    for managed in wanted:
        bench.engine.prefetch(managed)  # there is no room

    with bench.device.serving(bench.engine):
        bench.engine.make_room(2 * PIECE)
        bench.device.take(-1, 2 * PIECE)

    assert [managed.state for managed in wanted] == [AWAY, AWAY]
    assert bench.device.in_memory_bytes() <= 4 * PIECE


def test_what_does_not_give_its_memory_back_is_not_copied_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    managed = bench.make()
    monkeypatch.setattr(bench.device, "release", lambda *_: False)
    bench.engine.evict(managed, release=True)
    bench.kept.clear()  # the program has it no more
    bench.device.finish(bench.device.pending[-1])
    assert not bench.device.pending
    assert managed.storage() is None


def test_a_refused_prefetch_is_tried_again_when_memory_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    prepare_copy_in, answers = bench.device.prepare_copy_in, iter([False, True])
    monkeypatch.setattr(
        bench.device,
        "prepare_copy_in",
        lambda *asked, **how: next(answers) and prepare_copy_in(*asked, **how),
    )
    managed, other = bench.away(), bench.make()
    bench.engine.prefetch(managed)
    for _ in range(10):
        bench.engine.end_kernel()
    assert managed.state == AWAY

    bench.engine.evict(other, release=True)
    bench.device.finish(bench.device.pending[0])
    bench.engine.end_kernel()
    assert managed.state == COMING


def test_a_refused_demand_is_tried_again_when_as_much_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(timeout_s=5.0)
    wanted = bench.away()
    for coming in [bench.away() for _ in range(4)]:  # when these have come, there is no more memory
        bench.engine.prefetch(coming)
    bench.make()
    prepare_copy_in, full_bytes, asked = bench.device.prepare_copy_in, bench.device.in_memory_bytes(), []

    def refused(managed: ManagedStorage, *rest: Any, **how: Any) -> bool:
        asked.append(managed)
        return bench.device.in_memory_bytes() < full_bytes and prepare_copy_in(managed, *rest, **how)

    monkeypatch.setattr(bench.device, "prepare_copy_in", refused)
    with bench.device.serving(bench.engine):
        bench.engine.demand([wanted])
    assert wanted.state == RESIDENT and len(asked) == 2


def test_the_first_of_two_begins_to_come_where_there_is_room_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(2 * PIECE, timeout_s=1.0)
    wanted, leaving = [bench.away() for _ in range(2)], [bench.make() for _ in range(2)]
    for managed in leaving:
        bench.engine.evict(managed, release=True)
    bench.device.finish(bench.device.pending[0])
    copy_in, states = bench.device.copy_in, []

    def begun(*copy: Any) -> None:
        states.append(leaving[1].state)
        copy_in(*copy)
        bench.device.at_once = 1.0

    monkeypatch.setattr(bench.device, "copy_in", begun)
    with bench.engine.lock:
        bench.engine.demand(wanted)
    assert states == [LEAVING, AWAY]
    assert [managed.state for managed in wanted] == [RESIDENT, RESIDENT]


def test_what_is_packed_and_leaves_while_memory_is_found_for_it_comes_back_by_its_copy() -> None:
    bench = Bench(2 * PIECE, timeout_s=5.0)
    managed = bench.make()
    bench.kept[0].fill_(7)
    bench.engine.evict(managed, packs=4, release=True)
    bench.device.finish(bench.device.pending[0])
    assert managed.state == AWAY and managed.packed_bytes and managed.freeing_bytes
    managed.pins += 1
    bench.device.at_once = 1.0  # what waits finds the packed bytes written
    bench.engine.demand([managed])
    packed_bytes = packed_size(managed)
    assert [moved.size_bytes for moved in bench.engine.moved] == [packed_bytes, packed_bytes, PIECE]
    assert managed.state == RESIDENT and content(bench.kept[0]) == bytes([7]) * PIECE
    assert bench.device.live == {managed.key: PIECE}


def test_what_a_prefetch_began_while_a_kernel_waited_for_room_is_not_brought_twice() -> None:
    bench = Bench(anywhere=True, timeout_s=5.0)
    wanted = [bench.away() for _ in range(2)]
    bench.engine.evict(bench.make(), release=True)
    bench.device.engine = bench.engine
    bench.device.trouble = 1.0  # there is no memory as long as that is under way
    bench.engine.prefetch(wanted[1])

    def answer() -> None:
        with bench.engine.lock:
            bench.device.trouble, bench.device.at_once = 0.0, 1.0
            bench.device.finish(bench.device.pending[0])

    thread = threading.Thread(target=answer)
    with bench.engine.lock:
        thread.start()
        bench.engine.demand(wanted)
    thread.join()
    assert [managed.state for managed in wanted] == [RESIDENT, RESIDENT]
    assert bench.engine.in_flight_bytes == (0, 0)


def test_what_the_device_takes_while_it_is_copied_again_is_away_when_that_copy_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    managed = bench.make()

    def copy_out(*arguments: Any) -> None:
        begin(*arguments)
        managed.swapped_out = managed.copy_invalid = True

    begin = bench.device.copy_out
    bench.engine.evict(managed, release=True)
    monkeypatch.setattr(bench.device, "release", lambda *_: False)  # it was written
    monkeypatch.setattr(bench.device, "copy_out", copy_out)
    bench.device.finish(bench.device.pending[0])
    assert managed.state == RESIDENT and not bench.device.pending
    bench.engine.evict(managed, release=True)
    assert managed.state == LEAVING and len(bench.device.pending) == 1
    bench.device.finish(bench.device.pending[0])
    assert managed.state == AWAY and not bench.device.pending


@pytest.mark.parametrize(
    "wait",
    [
        lambda bench, managed: bench.engine.make_room(bench.engine.budget_bytes),
        lambda bench, managed: bench.engine.demand([managed]),
        lambda bench, managed: bench.engine.evict_and_wait(PIECE),
        lambda bench, managed: bench.engine.drain(),
    ],
    ids=["make_room", "demand", "evict_and_wait", "drain"],
)
def test_every_wait_for_a_disk_that_hangs_ends(wait: Callable[[Bench, ManagedStorage], None]) -> None:
    bench = Bench(timeout_s=0.05)
    managed = bench.away()
    bench.engine.evict(bench.make(), release=True)

    with pytest.raises(SpillError, match="the disk of the test does not answer"), bench.engine.lock:
        wait(bench, managed)


def test_a_disk_that_answers_again_is_used_again() -> None:
    bench = Bench(timeout_s=0.05)
    managed = bench.away()
    with pytest.raises(SpillError), bench.engine.lock:
        bench.engine.demand([managed])
    bench.engine.begin_step()
    with bench.device.serving(bench.engine):
        bench.engine.demand([managed])
    assert managed.state == RESIDENT


def test_a_copy_that_fails_does_not_end_drain_before_the_others_are_over() -> None:
    bench = Bench(timeout_s=5.0)
    for managed in (bench.make(), bench.make()):
        bench.engine.evict(managed, release=True)
    bench.device.finish(bench.device.pending[0], SpillError("Input/output error"))
    with bench.device.serving(bench.engine):
        bench.engine.drain()
    assert bench.engine.in_flight_bytes == (0, 0)


def test_copies_of_one_tier_do_not_wait_for_those_of_another() -> None:
    bench = Bench(anywhere=True, host_slots=9, in_flight_bytes=PIECE, timeout_s=5.0)
    tiers = ("disk", "disk", "host", "host")
    going = [bench.make() for _ in tiers]
    for managed, tier in zip(going, tiers, strict=True):
        bench.engine.evict(managed, tier, release=True)
    assert [copy.managed for copy in bench.device.pending] == [going[0], going[2]]
    bench.device.finish(bench.device.pending[1])
    assert [copy.managed for copy in bench.device.pending] == [going[0], going[3]]
    while bench.device.pending:
        bench.device.finish(bench.device.pending[0])
    assert [managed.state for managed in going] == [AWAY] * 4

    for managed in going:
        bench.engine.prefetch(managed)
    assert [copy.managed for copy in bench.device.pending] == [going[0], going[2]]


def test_what_comes_by_another_link_leaves_room_for_what_waits_for_its_own() -> None:
    bench = Bench(3 * PIECE, anywhere=True, host_slots=9, in_flight_bytes=PIECE, timeout_s=5.0)
    first, second, third = bench.away("disk"), bench.away("disk"), bench.away("host")
    stays = bench.make()
    for managed in (first, second, third):
        bench.engine.prefetch(managed)
    assert [copy.managed for copy in bench.device.pending] == [first], "of three places, two are spoken for"
    bench.engine.evict(stays, "host", release=True)
    bench.device.finish(bench.device.pending[1])
    assert [copy.managed for copy in bench.device.pending] == [first, third]


def test_a_copy_goes_where_the_plan_says_though_the_last_one_went_elsewhere() -> None:
    bench = Bench(anywhere=True, host_slots=1, timeout_s=5.0)
    managed = bench.away()  # unplanned: to the host, which has room
    assert managed.slot.tier == "host"
    with bench.device.serving(bench.engine):
        bench.engine.demand([managed])
    assert managed.clean
    bench.engine.evict(managed, "disk", release=True)
    bench.device.finish(bench.device.pending[0])
    assert managed.slot.tier == "disk" and managed.state == AWAY
    assert len(bench.device.slots) == 1, "the first place is free"

    other = bench.away()
    with bench.device.serving(bench.engine):
        bench.engine.demand([managed])
    bench.engine.evict(managed, "host", release=True)
    assert managed.state == AWAY and not bench.device.pending, "there is no room: its copy serves"
    assert other.slot.tier == "host"


def test_outdated_copies_make_room_on_their_tier() -> None:
    bench = Bench(anywhere=True, host_slots=1, timeout_s=5.0)
    old = bench.away()
    with bench.device.serving(bench.engine):
        bench.engine.demand([old])
    new = bench.make()
    bench.engine.evict(new, "host", release=True)
    assert new.slot.tier == "disk", "the copy there counts still"
    bench.device.finish(bench.device.pending[0])

    bench.engine.will_write(old)
    newest = bench.away("host")
    assert newest.slot.tier == "host" and old.slot is None
