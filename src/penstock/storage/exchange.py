"""What ranks of one job learn about I/O paths, divided among them and told to each other while they run.

Fastensor (section 4.3) has one device of several that are equal explore, and broadcast what it found; devices
that differ, or have other parts of a model, explore each for itself. Here ranks claim size classes, in the
key-value store of their process group. A key holds the kind of device and its I/O paths: ranks where these
differ do not meet. Who claims a class first explores it, and tells the others; until then they use the best
that they know. Nobody waits: a thread of each rank claims, tells and asks while it trains, and what is not
told in time is explored after all. So a class that one rank alone has is explored there.
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

# Who claimed a class tells the others after so long, whether or not all is known. They wait twice as long.
PATIENCE_S = 15.0
MOST_TOLD_BYTES = 1 << 20
_YIELD_S = 0.5  # to the rank whose claim comes first
_PAUSES_S = (0.02, 0.5)  # between two looks: at first, and where nothing has changed for long
_CLOSING_S = 2.0


class Exchange:
    """Shares what choices learn with those of the other ranks, in a thread, until `close`.

    choices     by a name that all ranks give them
    lock        of the choices
    kind        of device; ranks where it is another one, or the I/O paths, do not meet
    explorers   "divided": each size class is explored by one rank; "one": all of them by the same rank
    rank, ranks of the job: each has the first claim to some of the classes

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
        """Share no more. Waits for the store for two seconds at most. Idempotent."""
        self._stop.set()
        self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        pause_s = _PAUSES_S[0]
        try:
            while not self._stop.wait(pause_s):
                pause_s = _PAUSES_S[0] if self._look() else min(1.2 * pause_s, _PAUSES_S[1])
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

    def _look(self) -> bool:
        """Go on with every class that is not over. Gives whether one has begun or ended."""
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
        """What is done for a size class: True as often as there is something to wait for."""
        begun_s = time.monotonic()
        same = repr((self._kind, name, sorted(choice.paths.items()))).encode()
        every = f"penstock/io-costs/{hashlib.sha256(same).hexdigest()[:32]}"
        key = f"{every}/{number}"
        preferred = 0 if self._one else number % self._ranks
        while preferred != self._rank and time.monotonic() - begun_s < _YIELD_S:
            yield True
        if self._is_first(every if self._one else key):
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
            choice.explore(number)  # what was not told
            choice.learn(found)

    def _is_first(self, key: str) -> bool:
        if key not in self._claimed:
            self._claimed[key] = self._store.add(f"{key}/claims", 1) == 1
        return self._claimed[key]

    def _received(self, key: str) -> Tables:
        """What another rank has told; nothing where that is not what a file may hold."""
        name = "what another rank tells of I/O paths"
        try:
            if len(data := self._store.get(key)) > MOST_TOLD_BYTES:
                raise InvalidFile(f"{name} has {len(data)} bytes: no rank has so much to tell of one size")
            found = files.decoded(CostTables, data, name)
        except InvalidFile as error:
            logger.warning("this rank finds out by itself what I/O paths cost: %s", error)
            return Tables()
        return found.devices.get(self._kind, Tables())


_open: weakref.WeakSet[Exchange] = weakref.WeakSet()


os.register_at_fork(after_in_child=_open.clear)  # their threads stay with the parent


@atexit.register
def _close_all() -> None:
    # A thread that comes back from the store must find the interpreter whole.
    for exchange in list(_open):
        exchange.close()
