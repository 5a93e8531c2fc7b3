"""Requests of a forked process, carried out by a process of its own.

`obstore` has threads, which a fork does not copy: in a child of a process that has used it, it would wait for
ever. A DataLoader forks its workers. So each forked process starts one fresh process at its first request,
which ends with it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

_REQUESTS_AT_ONCE = 64
_CODE = """import sys
sys.path[:] = sys.argv[2:]
from penstock.storage.objects_elsewhere import serve
serve(int(sys.argv[1]))"""


class _Failed(NamedTuple):
    """An error of obstore: the name of its class, its module, and its text."""

    kind: str
    module: str
    text: str


class Got(NamedTuple):
    """What `get` gives: of an object its size, and the bytes that were asked for."""

    meta: dict[str, int]
    data: bytes

    def buffer(self) -> bytes:
        return self.data


_LOST = _Failed("GenericError", "obstore", "the process that asks for objects has ended: timed out")


class Helper:
    """The process that carries out requests of this one. Any number of threads may ask.

    has_ended   it carries out nothing any more: another one has to
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for this process, which may go on after it
            )
        self.has_ended = False
        self._connection = Connection(ours.detach())
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers = 0
        threading.Thread(target=self._receive, name="penstock-objects", daemon=True).start()

    def call(self, url: str, timeout_s: float, method: str, *arguments: Any, **options: Any) -> Any:
        """What the method of the store at ``url`` returns, or raises."""
        future: Future[Any] = Future()
        with self._lock:
            self._numbers += 1
            self._waiting[self._numbers] = future
            try:
                self._connection.send((self._numbers, url, timeout_s, method, arguments, options))
            except BaseException as error:
                self._waiting.pop(self._numbers, None)
                if not isinstance(error, OSError):
                    raise
                future = Future()
                future.set_result(_LOST)
        result = future.result()
        if isinstance(result, _Failed):
            raise type(result.kind, (Exception,), {"__module__": result.module})(result.text)
        return result

    def _receive(self) -> None:
        try:
            while True:
                number, result = self._connection.recv()
                self._waiting.pop(number).set_result(result)
        except (EOFError, OSError):
            self.has_ended = True
            for future in list(self._waiting.values()):
                future.set_result(_LOST)


def serve(descriptor: int) -> None:
    """Carry out what comes over the socket, until it is closed."""
    from penstock.storage.objects import open_store

    connection, lock, opening = Connection(descriptor), threading.Lock(), threading.Lock()
    stores: dict[tuple[str, float], Any] = {}

    def carry_out(number: int, url: str, timeout_s: float, method: str, arguments: Any, options: Any) -> None:
        result: Any
        try:
            with opening:  # the first one also imports obstore
                store = stores.get((url, timeout_s))
                if store is None:
                    store = stores[url, timeout_s] = open_store(url, timeout_s)
            result = getattr(store, method)(*arguments, **options)
            if method == "get":
                result = Got({"size": result.meta["size"]}, bytes(result.buffer()))
            elif method == "list":
                result = list(result)
        except Exception as error:
            result = _Failed(type(error).__name__, type(error).__module__, str(error))
        with lock, contextlib.suppress(OSError):
            connection.send((number, result))

    pool = ThreadPoolExecutor(_REQUESTS_AT_ONCE)
    with contextlib.suppress(EOFError, OSError):
        while True:
            pool.submit(carry_out, *connection.recv())
    os._exit(0)  # what is under way is wanted by nobody any more
