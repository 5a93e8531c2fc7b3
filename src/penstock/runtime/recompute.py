"""Recomputation: a kernel runs again to restore a dropped tensor, with the same bits.

When a kernel runs whose result the schedule drops later, a recipe is kept: how to run it again. It is valid
while nothing writes to its inputs and outputs. Before each write the clock or the device calls `will_write`,
which recomputes what is dropped. A recipe keeps its inputs alive only while one of its outputs is dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from penstock import _native
from penstock.capture.operators import Operator, tensors_in
from penstock.errors import PenstockError
from penstock.runtime.copy_engine import CopyEngine
from penstock.runtime.devices import Device
from penstock.runtime.faults import start_serving, stop_serving
from penstock.runtime.recipes import (
    NotRepeatable,
    Recipe,
    TensorArgument,
    default_generator,
    is_plain,
    made_again,
    run,
    switches,
    writer,
)
from penstock.runtime.snapshots import Snapshots
from penstock.runtime.storages import DROPPED, LEAVING, NEVER, RESIDENT, ManagedStorage

logger = logging.getLogger("penstock")


class Recomputation:
    """Keeps recipes of kernels, drops their outputs, and runs them again.

    recomputed_bytes, recompute_s   since `begin_step`; seconds without waits
    kept                            tensors that should have been dropped, and could not be recomputed; since
                                    `begin_step`
    """

    def __init__(self, device: Device, engine: CopyEngine) -> None:
        self._device = device
        self._engine = engine
        self._recipes: dict[ManagedStorage, Recipe] = {}  # by what they make
        self._readers: dict[ManagedStorage, list[Recipe]] = {}  # by what they read
        self._running: set[ManagedStorage] = set()
        self.recomputed_bytes = 0
        self.recompute_s = 0.0
        self.kept = 0
        self.snapshots = Snapshots(device, engine, self)
        engine.recompute = self.recompute

    def begin_step(self) -> None:
        self.recomputed_bytes = 0
        self.recompute_s = 0.0
        self.kept = 0

    # -- recipes -------------------------------------------------------------------------------

    @staticmethod
    def state_before(facts: Operator, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """The random state to save before the kernel runs; None where it draws no random numbers."""
        if not facts.draws:
            return None
        generator = (kwargs or {}).get("generator")
        if generator is None:
            device = next((tensor.device for tensor in tensors_in((args, kwargs))), torch.device("cpu"))
            generator = default_generator((kwargs or {}).get("device") or device)
        return generator, generator.get_state()

    def keep_recipe(
        self,
        operator: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        result: Any,
        before: Any,
        need_bytes: int,
        find: Callable[[torch.UntypedStorage], ManagedStorage],
    ) -> None:
        """Keep a recipe of a kernel that has run, whose results are to be dropped later.

        before       what `state_before` returned
        need_bytes   device memory that it allocated
        find         the ManagedStorage of a storage
        """
        reads: dict[ManagedStorage, None] = {}

        def described(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if not is_plain(value):
                    raise NotRepeatable
                managed = find(value.untyped_storage())
                reads.update(dict.fromkeys(managed.parts()))
                return TensorArgument.of(value, managed)
            if isinstance(value, tuple | list):
                return type(value)(map(described, value))
            return value

        try:
            kept_args = tuple(map(described, args))
            kept_kwargs = {name: described(value) for name, value in (kwargs or {}).items()}
        except (NotRepeatable, TypeError):
            return
        makes: dict[ManagedStorage, int] = {}
        for position, tensor in enumerate(tensors_in(result)):
            managed = find(tensor.untyped_storage())
            if managed not in reads and not managed.is_part:
                makes.setdefault(managed, position)
        copies = not self._device.memory.in_arena  # which takes the memory of results as theirs
        most_bytes = self._engine.budget_bytes // 2 if copies else NEVER
        if any(managed.size_bytes > most_bytes for managed in makes):
            return
        need_bytes = max(need_bytes, sum(managed.size_bytes for managed in makes))
        in_place = write = None
        if (
            copies
            and len(makes) == 1
            and before is None
            and isinstance(result, torch.Tensor)
            and is_plain(result)
        ):
            write = writer(operator, args, result.device.type)
        if write is not None:
            in_place = TensorArgument.of(result, next(iter(makes)))
        recipe = Recipe(
            operator,
            kept_args,
            kept_kwargs,
            before,
            switches(),
            list(reads),
            makes,
            in_place,
            write,
            need_bytes,
        )
        for managed in makes:
            if managed in self._recipes:
                self._remove(self._recipes[managed])
            self._recipes[managed] = recipe
            self.watch(managed, +1)
        for managed in reads:
            self._readers.setdefault(managed, []).append(recipe)
            self.watch(managed, +1)

    def watch(self, managed: ManagedStorage, change: int) -> None:
        """Count what needs the storage's present content, a recipe or a save: +1 or -1."""
        managed.recipes += change
        storage = managed.storage()
        if storage is not None and managed.movable:
            self._device.watch_writes(managed, storage, change)

    def _remove(self, recipe: Recipe) -> None:
        """Delete a recipe none of whose outputs is dropped."""
        for managed in recipe.makes:
            if self._recipes.pop(managed, None) is not None:
                self.watch(managed, -1)
        for managed in recipe.reads:
            readers = self._readers[managed]
            readers.remove(recipe)
            if not readers:
                del self._readers[managed]
            self.watch(managed, -1)
        recipe.held.clear()

    # -- dropping ------------------------------------------------------------------------------

    def drop(self, managed: ManagedStorage) -> None:
        """Free the storage's memory without a copy; evict it where it cannot be recomputed."""
        if managed.state != RESIDENT or managed.clean or managed.writing_packed or managed.pins:
            self._engine.release(managed)
            return
        recipe = self._recipes.get(managed)
        storage = managed.storage()
        held = [read.storage() for read in recipe.reads] if recipe is not None else []
        if recipe is None or storage is None or any(read is None for read in held):
            self.kept += 1
            self._engine.release(managed)
            return
        if self._device.memory.in_arena:
            start_serving(self)
        # Before the memory is freed: an access may fault at once.
        recipe.held, managed.state = [*recipe.held, *held], DROPPED
        dropped = False
        try:
            dropped = self._device.drop(managed, storage)
        finally:
            if not dropped:
                managed.state = RESIDENT
        if dropped:
            self._engine.memory.reserved_bytes -= managed.size_bytes
            return
        self.kept += 1
        self._engine.release(managed)
        if not recipe.is_needed:
            recipe.held.clear()

    # -- running again -------------------------------------------------------------------------

    def recompute(self, managed: ManagedStorage) -> None:
        """Recompute a dropped storage. The engine's lock is held, once; it is released while the kernel runs.

        Raises what the kernel raises, BudgetTooSmall, SpillError.
        """
        engine = self._engine
        while managed in self._running:
            engine.wait_for_change()
        if managed.state != DROPPED or managed.storage() is None:
            return
        recipe = self._recipes[managed]
        used = [managed, *recipe.reads]
        for storage in used:
            storage.pins += 1
        self._running.add(managed)
        try:
            if any(read.state > LEAVING for read in recipe.reads):
                engine.demand(recipe.reads)
            engine.make_room(recipe.need_bytes, expected=self._device.memory.in_arena)
            self._device.will_use(recipe.reads)
            target = managed.storage() if recipe.result is not None else None
            if target is not None:
                while not self._device.prepare_write(managed, target):
                    engine.make_some_room(managed.size_bytes)
            try:
                result = self._run_again(recipe, managed, in_place=target is not None)
            except BaseException:
                if target is not None:
                    self._device.cancel_copy_in(managed, target)
                raise
            if target is not None:
                self._mark_resident(managed, recipe)
        finally:
            for storage in used:
                storage.pins -= 1
            self._running.discard(managed)
            engine.notify_change()
        target = managed.storage()
        if target is None or managed.state != DROPPED:
            return
        assert result is not None
        if not self._device.memory.in_arena:
            self._device.will_use(())
            engine.make_room(managed.size_bytes)
        while not self._device.fill(managed, target, result):
            engine.make_some_room(managed.size_bytes)
        self._mark_resident(managed, recipe)

    def _run_again(
        self, recipe: Recipe, managed: ManagedStorage, in_place: bool
    ) -> torch.UntypedStorage | None:
        """Run the kernel without the engine's lock, if need be with more memory freed. Returns what it made;
        None where that is in its place."""
        while True:
            began_s = time.perf_counter()
            try:
                with self._engine.unlocked():
                    if in_place and recipe.result is not None:
                        run(recipe, recipe.result.tensor())
                        return None
                    return made_again(recipe, managed)
            except Exception as error:
                failed = error
            finally:
                self.recompute_s += time.perf_counter() - began_s
            if not self._device.room.frees_enough(failed, recipe.need_bytes):
                self._device.room.kernel_failed(failed, recipe.need_bytes)
                raise failed

    def _mark_resident(self, managed: ManagedStorage, recipe: Recipe) -> None:
        managed.state = RESIDENT
        managed.clean = False
        self.recomputed_bytes += managed.size_bytes
        if not recipe.is_needed:
            recipe.held.clear()

    def will_write(self, managed: ManagedStorage) -> None:
        """The storage is about to be written: recompute first what depends on its present content, and wait
        for the save that is to have it."""
        self.snapshots.will_write(managed)
        for recipe in list(self._readers.get(managed, ())):
            self._finish(recipe)
        if (own := self._recipes.get(managed)) is not None:
            self._finish(own)

    def _finish(self, recipe: Recipe) -> None:
        for made in recipe.makes:
            if made.state == DROPPED and made.storage() is not None:
                self.recompute(made)
        self._remove(recipe)

    def recompute_all(self) -> None:
        """Recompute everything that is dropped. Raises what `recompute` raises."""
        with _disable_current_modes(), self._engine.lock:
            for recipe in dict.fromkeys(self._recipes.values()):
                self._finish(recipe)

    def close(self) -> None:
        """Serve no more faults."""
        stop_serving(self)

    def end_step(self) -> None:
        """Delete the recipes none of whose outputs is dropped."""
        for recipe in dict.fromkeys(self._recipes.values()):
            if not recipe.is_needed:
                self._remove(recipe)

    def on_storage_freed(self, managed: ManagedStorage) -> None:
        """The program has freed the storage: delete its recipes."""
        for recipe in list(self._readers.get(managed, ())):
            self._remove(recipe)  # it did not keep this input alive, so none of its outputs is dropped
        own = self._recipes.get(managed)
        if own is None:
            return
        if not own.is_needed:
            own.held.clear()
        if all(made.storage() is None for made in own.makes):
            self._remove(own)

    # -- faults: accesses without an operator --------------------------------------------------

    def serve_fault(self, address: int, is_write: bool) -> bool:
        """Recompute the dropped storage at an address, and before a write what depends on it. False: it is no
        storage of the run, or cannot be recomputed."""
        try:
            with self._engine.lock:
                managed = self.find(address)
                if managed is not None and managed.state == DROPPED:
                    self.recompute(managed)
                if managed is not None and is_write:
                    self.will_write(managed)
            return managed is not None and _native.arena_state(managed.address) != "dropped"
        except Exception as error:
            logger.error("what was dropped is needed, and cannot be recomputed: %s", error)
            return False

    def serve_fault_of_lock_holder(self, address: int, is_write: bool) -> bool:
        """As `serve_fault`, for a thread that holds the engine's lock: one that runs a finalizer inside the
        engine. It waits, so nothing else changes. Nothing is evicted: the engine may be in the middle of a
        change. Inputs that are away return when the kernel touches their pages."""
        try:
            managed = self.find(address)
            if managed is not None:
                self._recompute_for_lock_holder(managed)
            if managed is not None and is_write:
                self.snapshots.give_up(
                    "a finalizer wrote, amid the run's own work, to what it saves", managed
                )
            if managed is None or (is_write and managed.recipes):
                raise PenstockError(
                    "a finalizer writes, amid the run's own work, to a tensor that others are recomputed "
                    "from: write to none there, or train with PlanOptions(recompute=False)"
                )
            return _native.arena_state(managed.address) != "dropped"
        except Exception as error:
            logger.error("what was dropped is needed, and cannot be recomputed: %s", error)
            return False

    def _recompute_for_lock_holder(self, managed: ManagedStorage) -> None:
        storage = managed.storage()
        if managed.state != DROPPED or storage is None:
            return
        recipe = self._recipes[managed]
        for read in recipe.reads:
            self._recompute_for_lock_holder(read)
        if self._device.fill(managed, storage, made_again(recipe, managed)):
            self._mark_resident(managed, recipe)

    def find(self, address: int) -> ManagedStorage | None:
        """The storage at an address."""
        block, storages = _native.arena_block(address), self._device.storages
        return storages.at(block[0]) if block is not None else None

    def lock_is_held_by(self, thread: int) -> bool:
        """Whether that thread holds the engine's lock. Only the lock's repr has its owner."""
        return f"owner={thread} " in repr(self._engine.lock)
