"""Processes of their own that do the same at the same time, for benchmarks of several ranks."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

LEAD_S = 0.02  # from the command to its beginning: all have got it by then


class Processes(AbstractContextManager["Processes"]):
    """``count`` processes, each with an object of its own that ``make(index, *arguments)`` gives.

    Raises RuntimeError with a process's own words where it fails, TimeoutError where it takes too long.
    """

    def __init__(self, count: int, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for index in range(count):
            pipe, other = context.Pipe()
            process = context.Process(target=_serve, args=(other, make, index, *arguments), daemon=True)
            process.start()
            other.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def ask(self, count: int, method: str, *arguments: Any, timeout_s: float = 300) -> list[Any]:
        """What ``method`` gives in the first ``count`` processes, which all begin it at the same time."""
        begin_s = time.monotonic() + LEAD_S
        for pipe in self._pipes[:count]:
            pipe.send((begin_s, method, arguments))
        answers = []
        for index, pipe in enumerate(self._pipes[:count]):
            if not pipe.poll(timeout_s):
                raise TimeoutError(f"process {index}: {method} took longer than {timeout_s} s")
            try:
                worked, answer = pipe.recv()
            except EOFError:
                raise RuntimeError(f"process {index} ended in {method}") from None
            if not worked:
                raise RuntimeError(f"process {index}: {answer}")
            answers.append(answer)
        return answers

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def together_s(answers: Sequence[tuple[float, float]]) -> float:
    """From the first beginning to the last end, of (began, ended) by time.monotonic()."""
    return max(ended for _, ended in answers) - min(began for began, _ in answers)


def _serve(pipe: Connection, make: Callable[..., Any], index: int, *arguments: Any) -> None:
    with make(index, *arguments) as served:
        while True:
            try:
                begin_s, method, given = pipe.recv()
            except EOFError:
                return
            time.sleep(max(0.0, begin_s - time.monotonic()))
            try:
                pipe.send((True, getattr(served, method)(*given)))
            except BaseException:
                pipe.send((False, traceback.format_exc(limit=-3)))
