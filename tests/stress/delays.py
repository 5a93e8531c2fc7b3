"""Other schedules of the same program: delays drawn from a seed wherever threads meet.

In C++ at every lock, unlock, wait and step of I/O, where the extension was built with PENSTOCK_SEAMS; in
Python at every lock and unlock of penstock's modules; and between bytecodes, by how often the interpreter
changes threads.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import types
from typing import Any

import penstock.checkpoint.background
import penstock.runtime.opening  # noqa: F401  with all that have locks
from penstock import _native

SEAMS = hasattr(_native, "delay_at_random")

_LOCKS = (type(threading.Lock()), type(threading.RLock()))


class _Delays:
    """Those of Python. Threads number themselves as they come: a seed gives much the same delays again."""

    def __init__(self) -> None:
        self.begin(0, 0.0, 0.0)

    def begin(self, seed: int, share: float, longest_s: float) -> None:
        self.seed, self._share, self._longest_s = seed, share, longest_s
        self._threads = 0
        self._own = threading.local()

    def pause(self) -> None:
        if not self._share:
            return
        draw = getattr(self._own, "draw", None)
        if draw is None:
            self._threads += 1
            draw = self._own.draw = random.Random(self.seed * 1000 + self._threads).random
        if (drawn := draw()) < self._share:
            time.sleep(drawn / self._share * self._longest_s)


_delays = _Delays()


class _Lock:
    """A lock that takes its time."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def acquire(self, *args: Any) -> bool:
        _delays.pause()
        return bool(self._lock.acquire(*args))

    def release(self) -> None:
        self._lock.release()
        _delays.pause()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:  # what a condition asks of its lock
        return getattr(self._lock, name)


def install() -> None:
    """Locks of penstock's modules take their time, from now on made."""
    wrapped = types.SimpleNamespace(**vars(threading))
    wrapped.Lock = lambda: _Lock(threading.Lock())
    wrapped.RLock = lambda: _Lock(threading.RLock())
    wrapped.Condition = lambda lock=None: threading.Condition(lock or wrapped.RLock())
    for module in [module for name, module in sys.modules.items() if name.startswith("penstock.")]:
        conditions, locks = dict[str, Any](), dict[int, _Lock]()
        for name, value in list(vars(module).items()):
            if value is threading:
                setattr(module, name, wrapped)
            elif isinstance(value, _LOCKS):
                setattr(module, name, locks.setdefault(id(value), _Lock(value)))
            elif isinstance(value, threading.Condition):
                conditions[name] = value
        for name, value in conditions.items():  # of one of these locks, or one of their own
            setattr(module, name, wrapped.Condition(locks.get(id(value._lock))))  # type: ignore[attr-defined]


def current() -> int:
    """The seed of the delays in force."""
    return _delays.seed


def begin(seed: int) -> None:
    """Delays of this seed; 0: none."""
    rng = random.Random(seed)
    sys.setswitchinterval(rng.choice([1e-6, 1e-5, 1e-4, 5e-3]) if seed else 5e-3)
    share, longest_us = rng.choice([0.01, 0.05, 0.2]), rng.choice([50, 300, 2000])
    if longest_us == 2000:
        share = min(share, 0.05)
    _delays.begin(seed, share if seed else 0.0, longest_us * 1e-6)
    if SEAMS:
        _native.delay_at_random(seed, share, longest_us)  # type: ignore[attr-defined]
