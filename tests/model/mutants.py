"""Mends of Python's layer, taken out one at a time: the search must find each.

Not here is what the arena sees to as well: that a copy is invalid of which it knows that the bytes were
written, that what a recipe reads is there while it runs. It serves any access: that costs a fault, not bytes.
Nor what takes three storages (test_the_copy_engine_waits_for_the_right_thing), or two threads that compute
at once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """In `file`, `old` becomes `new`; a run of `configuration` shows it."""

    name: str
    configuration: str
    file: str
    old: str
    new: str
    fast: bool = False  # found in a second


MUTANTS = [
    Mutant(
        "what the arena took while it was copied is resident",
        "taken",
        "copy_engine",
        "            if managed.swapped_out:\n                managed.state, managed.clean",
        "            if False:\n                managed.state, managed.clean",
        fast=True,
    ),
    Mutant(
        "what the arena took before it was packed is resident",
        "packed, taken",
        "copy_engine",
        "managed.state = AWAY if managed.swapped_out else RESIDENT",
        "managed.state = RESIDENT",
        fast=True,
    ),
    Mutant(
        "a copy that is invalid counts",
        "taken",
        "copy_engine",
        "        elif not managed.copy_invalid:\n            managed.clean = True\n            if",
        "        else:\n            managed.clean = True\n            if",
        fast=True,
    ),
    Mutant(
        "copies that are given up stay the arena's",
        "full",
        "copy_engine",
        "        self._device.will_write(managed)\n        self._device.free_slot",
        "        self._device.free_slot",
    ),
    Mutant(
        "nothing keeps alive what is still written",
        "dying, packed",
        "copy_engine",
        "        if not managed.writing_packed:\n            managed.kept_alive = None\n        if error is",
        "        managed.kept_alive = None\n        if error is",
    ),
    Mutant(
        "what the arena took again on the way back is resident",
        "taken, touched",
        "copy_engine",
        "is_away = clean is None or managed.packed_bytes or managed.swapped_out",
        "is_away = clean is None or managed.packed_bytes",
    ),
    Mutant(
        "what is asked back while it leaves, leaves",
        "copies",
        "copy_engine",
        "        if managed.state == LEAVING or managed.writing_packed:  # it stays\n"
        "            self._unmark_released(managed)",
        "        if managed.state == LEAVING or managed.writing_packed:  # it stays\n            pass",
    ),
    Mutant(
        "what a kernel uses is released",
        "copies",
        "copy_engine",
        "        if managed.pins:\n            self.unpinned_later.append(managed)\n            return\n",
        "",
    ),
    Mutant(
        "nobody hears that a copy is over",
        "copies",
        "copy_engine",
        "                self._error = self._error or error\n"
        "            finally:\n                self._changed.notify_all()",
        "                self._error = self._error or error",
        fast=True,
    ),
    Mutant(
        "what is queued when all ends is forgotten",
        "copies",
        "copy_engine",
        "            for managed in self._evictions:\n                self._cancel_eviction(managed)\n",
        "",
        fast=True,
    ),
    Mutant(
        "what the arena brought back, and took again, is resident",
        "taken",
        "cpu",
        'managed.swapped_out = _native.arena_state(managed.address) == "out"  # and has let it leave again',
        "managed.swapped_out = False",
    ),
    Mutant(
        "a copy whose memory the arena took is an error",
        "taken",
        "cpu",
        "if managed.copy_invalid and transfer.error is not None and transfer.error.errno == errno.EFAULT:",
        "if False:",
    ),
    Mutant(
        "what left while it was copied is not noticed",
        "taken",
        "cpu",
        "managed.copy_invalid = True\n"
        "            self.report_unasked_moves()\n            if managed.copy_invalid and",
        "pass\n            if managed.copy_invalid and",
    ),
    Mutant(
        "packed bytes are forgotten while they are written",
        "packed, touched",
        "cpu",
        "        if not managed.writing_packed:\n            self._packed.pop(managed.key, None)",
        "        self._packed.pop(managed.key, None)",
    ),
    Mutant(
        "a read that failed keeps its memory",
        "failing",
        "cpu",
        "            _native.arena_unstage(staging[0])",
        "            pass",
    ),
    Mutant(
        "what was touched before its read failed is away",
        "failing",
        "cpu",
        'if state in ("in", "guarded"):  # somebody touched it meanwhile',
        "if False:",
    ),
    Mutant(
        "what is computed from it is forgotten when it is written",
        "recomputed",
        "recompute",
        "            self._finish(recipe)\n        if (own",
        "            self._remove(recipe)\n        if (own",
    ),
    Mutant(
        "what keeps its memory is copied again at once, and lives for ever by that",
        "kept",
        "copy_engine",
        "            managed.clean = False\n            managed.kept_alive = None\n\n    def will_write",
        "            managed.clean = False\n            managed.kept_alive = None\n"
        "            self.evict(managed, release=True)\n\n    def will_write",
        fast=True,
    ),
    Mutant(
        "packed bytes of what has other memory now are taken for its bytes",
        "shared, packed",
        "cpu",
        "        if storage is None or self._is_elsewhere(managed, storage):\n"
        "            return False\n        packed,",
        "        packed,",
    ),
    Mutant(
        "addresses that are being read are not lent",
        "shared, taken",
        "cpu",
        "                    managed.guarded = True\n                    return loan",
        "                    managed.guarded = True\n"
        "                    _native.arena_lent_back(loan)\n"
        "                    return 1 << 60",
    ),
]
