"""The long form: explores every configuration, and finds every mutant. Prints what was explored.

    python -m tests.model [NAME ...]

NAME    of configurations and mutants; all, if none is given
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection

from tests.model.configurations import CONFIGURATIONS
from tests.model.engine_world import Checker
from tests.model.explorer import Search
from tests.model.layer import Layer
from tests.model.mutants import MUTANTS, Mutant
from tests.support.apart import context

EXPLORED_S = 25.0  # most for one configuration
FOUND_S = 60.0  # for one mutant


def explore(
    name: str, layer: Layer | None = None, most_s: float | None = None, most_states: int | None = None
) -> Search:
    """One configuration, as far as the bounds allow."""
    logging.disable(logging.WARNING)  # errors are part of what is explored
    gc.collect()
    gc.freeze()  # what is there stays: collections in between would look at it each time
    with Checker(CONFIGURATIONS[name], layer) as checker:
        return Search(checker, most_states, most_s).explore()


def follow(name: str, path: list[str]) -> Search:
    """One run of a configuration. Raises ValueError where the code does not go that way."""
    with Checker(CONFIGURATIONS[name]) as checker:
        search = Search(checker).follow(path)
    if search.diverged:
        raise ValueError(f"{name}: no run goes like this: {'; '.join(path)}")
    return search


def seek(mutant: Mutant, most_s: float | None = FOUND_S) -> Search:
    return explore(mutant.configuration, Layer(mutant.file, ((mutant.old, mutant.new),)), most_s)


def alone(call: Callable[[], Search]) -> tuple[str, bool | None]:
    """In a process of its own: what is wrong may crash it. What was found, and whether something was; None:
    the checker itself failed."""
    came, send = context().Pipe(duplex=False)
    process = context().Process(target=_tell, args=(send, call))
    process.start()
    send.close()
    told: tuple[str, bool | None] | None = None
    with contextlib.suppress(EOFError):
        told = came.recv()
    process.join()
    if told is not None:
        return told
    return f"its process ends with status {process.exitcode}", True if (process.exitcode or 0) < 0 else None


def _tell(send: Connection, call: Callable[[], Search]) -> None:
    search = call()
    send.send((str(search), search.violation is not None))


def main(names: list[str]) -> int:
    jobs: list[tuple[str, bool, Callable[[], Search]]] = [
        *((name, False, partial(explore, name, None, EXPLORED_S)) for name in CONFIGURATIONS),
        *((mutant.name, True, partial(seek, mutant)) for mutant in MUTANTS),
    ]
    jobs = [job for job in jobs if not names or job[0] in names]
    failures = 0

    def carry_out(job: tuple[str, bool, Callable[[], Search]]) -> None:
        nonlocal failures
        name, is_mutant, call = job
        began_s = time.monotonic()
        text, found = alone(call)
        failures += found is not is_mutant
        verdict = "ok" if found is is_mutant else "NOT FOUND" if is_mutant else "WRONG"
        print(f"{verdict}: {name}: {text} ({time.monotonic() - began_s:.1f} s)", flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(carry_out, jobs))
    print(f"{len(jobs)} searches, {failures} that did not end as they should")
    return failures > 0
