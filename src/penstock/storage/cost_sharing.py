"""Shares measured costs of I/O paths among the ranks of a job, so that each size is explored by one of them.

In Fastensor (section 4.3) one of several equal devices explores, and broadcasts its results; devices that
differ, or hold other parts of a model, explore on their own. Here ranks claim size classes in the key-value
store of their process group. Keys contain the kind of device and its I/O paths: only ranks where both are
equal share. The first rank to claim a class explores it and publishes its costs; until then the others use
the best path they know. Training never waits: a thread on each rank claims, publishes and polls. A rank that
gets no costs in time explores the class itself.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from penstock.core import files
from penstock.errors import InvalidArgument, InvalidFile
from penstock.options import Explorers
from penstock.storage.choice import Choice
from penstock.storage.costs import CostTables, Tables

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger("penstock")

# A rank publishes the costs of its class after this long, complete or not. The others wait twice as long.
PATIENCE_S = 15.0
MOST_RECORD_BYTES = 1 << 20
_YIELD_S = 0.5  # a rank leaves its first claim to the preferred rank this long
_PAUSES_S = (0.02, 0.5)  # between two polls: at first, and after a long time without a change
_CLOSING_S = 2.0


class CostSharing:
    """Shares the costs that choices measure with the other ranks, in a thread, until `close`.

    choices     by a name that is the same on all ranks
    lock        guards the choices
    kind        of device; only ranks with the same kind and the same I/O paths share
    explorers   "divided": each size class is explored by one rank; "one": all of them by the same rank
    rank, ranks of the job: each rank is preferred for some of the classes

    Raises InvalidArgument for other explorers.
    """

    def __init__(
        self,
        store: Store,
        choices: Mapping[str, Choice],
        lock: threading.Lock,
        kind: str,
        explorers: Explorers,
        rank: int,
        ranks: int,
    ) -> None:
        if explorers not in ("divided", "one"):
            raise InvalidArgument(f"explorers are 'divided' or 'one' where ranks share, not {explorers!r}")
        self._store, self._lock, self._kind = store, lock, kind
        self._choices = dict(choices)
        self._one, self._rank, self._ranks = explorers == "one", rank, ranks
        self._claimed: dict[str, bool] = {}  # by key, whether this rank was the first
        self._seen: dict[str, set[int]] = {name: set() for name in choices}  # size classes
        self._waiting: list[Iterator[bool]] = []  # `_share` of each that is not over
        with lock:
            for choice in self._choices.values():
                choice.shares = True
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-io-costs", daemon=True)
        self._thread.start()
        _open.add(self)

    def close(self) -> None:
        """Stop sharing. Waits for the store for two seconds at most. Idempotent."""
        self._stop.set()
        self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        pause_s = _PAUSES_S[0]
        try:
            while not self._stop.wait(pause_s):
                pause_s = _PAUSES_S[0] if self._advance() else min(1.2 * pause_s, _PAUSES_S[1])
        except Exception as error:  # the store's errors are RuntimeErrors: its server has ended
            if not self._stop.is_set():
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                logger.warning("ranks tell each other no more of what I/O paths cost: %s", reason)
        finally:
            with self._lock:
                for choice in self._choices.values():
                    choice.shares = False
                    for number in choice.classes():
                        choice.explore(number)

    def _advance(self) -> bool:
        """Advance every class that is not done. Returns whether one has begun or ended."""
        begun = []
        for name, choice in self._choices.items():
            for number in self._known(choice).keys() - self._seen[name]:
                self._seen[name].add(number)
                begun.append(self._share(name, choice, number))
        before = len(self._waiting)
        self._waiting = [each for each in (*self._waiting, *begun) if next(each, False)]
        return bool(begun) or before != len(self._waiting)

    def _known(self, choice: Choice) -> dict[int, bool]:
        with self._lock:
            return choice.classes()

    def _share(self, name: str, choice: Choice, number: int) -> Iterator[bool]:
        """Explore or receive one size class. A generator, which yields True while it waits for something."""
        begun_s = time.monotonic()
        same = repr((self._kind, name, sorted(choice.paths.items()), choice.by_size)).encode()
        every = f"penstock/io-costs/{hashlib.sha256(same).hexdigest()[:32]}"
        key = f"{every}/{number}"
        preferred = 0 if self._one else number % self._ranks
        while preferred != self._rank and time.monotonic() - begun_s < _YIELD_S:
            yield True
        if self._claim(every if self._one else key):
            with self._lock:
                choice.explore(number)
            while not self._known(choice)[number] and time.monotonic() - begun_s <= PATIENCE_S:
                yield True
            with self._lock:
                entries = choice.tables().entries
            known = Tables(tuple(entry for entry in entries if entry.class_bytes == 1 << number))
            self._store.set(key, files.encoded(CostTables({self._kind: known})))
            return
        while not (has_come := self._store.check([key])) and time.monotonic() - begun_s <= 2 * PATIENCE_S:
            yield True
        found = self._received(key) if has_come else Tables()
        with self._lock:
            choice.explore(number)  # what was not published
            choice.learn(found)

    def _claim(self, key: str) -> bool:
        if key not in self._claimed:
            self._claimed[key] = self._store.add(f"{key}/claims", 1) == 1
        return self._claimed[key]

    def _received(self, key: str) -> Tables:
        """The costs that another rank published; none where the record is invalid."""
        name = "what another rank tells of I/O paths"
        try:
            if len(data := self._store.get(key)) > MOST_RECORD_BYTES:
                raise InvalidFile(f"{name} has {len(data)} bytes: no rank has so much to tell of one size")
            found = files.decoded(CostTables, data, name)
        except InvalidFile as error:
            logger.warning("this rank finds out by itself what I/O paths cost: %s", error)
            return Tables()
        return found.devices.get(self._kind, Tables())


_open: weakref.WeakSet[CostSharing] = weakref.WeakSet()


os.register_at_fork(after_in_child=_open.clear)  # their threads stay with the parent


@atexit.register
def _close_all() -> None:
    # A thread that comes back from the store must find the interpreter whole.
    for sharing in list(_open):
        sharing.close()
