"""Ctrl-C at random moments of what a process does, again and again, as in a notebook.

    python -m tests.soak.interrupts --times N [--programs train,save] [--seconds MOST] [--seed S]

A timer sends SIGINT after a random number of microseconds: into Python, callbacks of weak references, C++.
One KeyboardInterrupt comes out, what was in use is given back, and every few times the same process does it
all undisturbed, with the bits of before.

Python drops what is raised in a destructor or a callback. Where one of penstock's was, that is a failure.
Prints how many were interrupted, by program, and how many were dropped elsewhere.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import gc
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import penstock
from penstock import checkpoint, samples
from penstock.checkpoint import Manager
from penstock.runtime import arena, open_runs
from tests.stress import leftovers
from tests.support import packing_alone
from tests.support.families import FAMILIES, iterate, small_gpt
from tests.support.packing import contents
from tests.support.runs import HARDWARE, PAGED, bits

UNDISTURBED_EVERY, OF_A_PROCESS, LIMIT_S = 4, 100, 120.0

Program = Callable[
    [Path], Any
]  # of an empty folder, and "spill" beside it; what it gives must be equal each time


def train(folder: Path) -> Any:
    """A run from its beginning to its end."""
    model, optimizer = small_gpt()
    with penstock.offload(
        model,
        optimizer,
        device_budget="300KiB",
        spill_dir=folder.parent / "spill",
        hardware=HARDWARE,
        planning=PAGED,
    ) as run:
        for step in range(4):
            with run.step():
                iterate(model, optimizer, step)
        with run.step(kind="evaluation"), torch.no_grad():
            FAMILIES["gpt"].loss(model, 0)
    return bits(model.parameters())


def save_in_a_run(folder: Path) -> Any:
    """Checkpoints of a run, in the background and not, and what they hold."""
    model, optimizer = small_gpt()
    with (
        penstock.offload(
            model,
            optimizer,
            device_budget="400KiB",
            spill_dir=folder.parent / "spill",
            hardware=HARDWARE,
            planning=PAGED,
        ) as run,
        Manager(folder / "run", keep_last=2) as manager,
    ):
        for step in range(4):
            with run.step():
                iterate(model, optimizer, step)
            manager.save({"model": model.state_dict(), "step": step}, step, wait=step % 2 == 1)
        penstock.load(manager.latest(), into={"model": model.state_dict(), "step": 0})
    loaded = checkpoint.load(folder / "run" / "step-0000000003.safetensors")
    return bits(loaded["model"].values())


def save(folder: Path) -> Any:
    state = {str(number): torch.full((number,), 7) for number in (100_000, 5, 7_001)}
    for _ in range(3):
        checkpoint.save(state, folder / "state")
    return bits(checkpoint.load(folder / "state").values())


def pack(folder: Path) -> Any:
    packing_alone.pack_to(folder / "store")
    return contents(folder / "store")


def read(folder: Path) -> Any:
    """An epoch of a store, twice: in this thread, and decoded by others."""
    found = []
    with samples.mount(folder.parent / "store", cache_bytes="64KiB") as store:
        for threads in (0, 2):
            loader = samples.Loader(
                store, 7, num_threads=threads, decode=lambda sample: bytes(sample.data), collate_fn=list
            )
            found.append(list(loader))
    return found


PROGRAMS: dict[str, Program] = {each.__name__: each for each in (train, save_in_a_run, save, pack, read)}


class Dropped:
    """What Python could not raise, as where it was."""

    def __init__(self) -> None:
        self.elsewhere: collections.Counter[str] = collections.Counter()
        self.ours: list[str] = []

    def __call__(self, what: sys.UnraisableHookArgs) -> None:
        if not issubclass(what.exc_type, KeyboardInterrupt):
            self.ours.append(
                "".join(traceback.format_exception(what.exc_type, what.exc_value, what.exc_traceback))
            )
            return
        files = [frame.f_code.co_filename for frame in _frames(what.exc_traceback)]
        if any("/penstock/" in file for file in files):
            self.ours.append(f"{what.object!r}: {''.join(traceback.format_tb(what.exc_traceback))}")
        else:
            self.elsewhere[f"{what.object!r:.40}"] += 1

    @property
    def count(self) -> int:
        return len(self.ours) + self.elsewhere.total()


def _frames(trace: TracebackType | None) -> list[Any]:
    found = []
    while trace is not None:
        found.append(trace.tb_frame)
        trace = trace.tb_next
    return found


def interrupted(program: Program, folder: Path, moment_s: float) -> bool:
    """Whether a KeyboardInterrupt came out of it."""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, moment_s)
            program(folder)
        finally:  # it may come in here, too
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False


def repeat(name: str, place: Path, times: int, seconds: float, draw: random.Random) -> dict[str, Any]:
    """In this process. Raises AssertionError."""
    program, spill, dropped, fired = PROGRAMS[name], place / "spill", Dropped(), [0]

    def press(*_: object) -> None:
        fired[0] += 1
        signal.raise_signal(signal.SIGINT)

    def fresh() -> Path:
        return Path(tempfile.mkdtemp(dir=place))

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, press)
    sys.unraisablehook = dropped
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    assert arena.unavailable() is None  # installed
    wanted = program(fresh())
    began_s = time.monotonic()
    assert program(fresh()) == wanted
    length_s = time.monotonic() - began_s
    gc.collect()
    gc.freeze()
    before = leftovers.settled(spill)
    counts: collections.Counter[str] = collections.Counter()
    latest_s = time.monotonic() + seconds
    while counts["interrupted"] < times and time.monotonic() < latest_s:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        fired[0], dropped_before = 0, dropped.count
        moment_s = draw.uniform(1e-6, length_s)
        came = interrupted(program, fresh(), moment_s)
        text = f"after {moment_s:.6f} s of {length_s:.6f}"
        lost = fired[0] - came - (dropped.count - dropped_before)
        assert lost == 0, f"{lost} interrupts came out nowhere, {text}"
        assert not dropped.ours, f"dropped {text}: {dropped.ours[0]}"
        counts["interrupted" if came else "dropped by Python" if fired[0] else "over before"] += 1
        if open_runs.opened:  # it was open before anybody had it: the next one says how to close it
            counts["left open"] += 1
            penstock.close()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, text
        try:
            leftovers.check(before, spill)
        except AssertionError as error:
            raise AssertionError(f"{text}: {error}") from None
        if draw.randrange(UNDISTURBED_EVERY) == 0:
            began_s = time.monotonic()
            assert program(fresh()) == wanted, f"other bits, {text}"
            length_s = 0.8 * length_s + 0.2 * (time.monotonic() - began_s)
            counts["undisturbed"] += 1
    return {**counts, "dropped at": dict(dropped.elsewhere)}


def in_child(name: str, times: int, seconds: float, seed: int) -> dict[str, Any] | None:
    """What it found; None where it failed, which it has said."""
    with tempfile.TemporaryDirectory(prefix="interrupts-") as directory:
        place = Path(directory)
        (place / "spill").mkdir()
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                if name == "read":
                    packing_alone.pack_to(place / "store")
                found = repeat(name, place, times, seconds, random.Random(seed))
                os.write(writing, json.dumps(found).encode())
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        os.close(writing)
        with open(reading) as file:
            said = file.read()
        os.waitpid(process, 0)
    return json.loads(said) if said else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.interrupts", description=__doc__)
    parser.add_argument("--times", type=int, default=100, help="of each program")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most, of each program")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="comma-separated; all unless told")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("penstock").setLevel(logging.ERROR)
    failures = 0
    for name in options.programs.split(","):
        total: collections.Counter[str] = collections.Counter()
        seed, latest_s = options.seed, time.monotonic() + options.seconds
        while total["interrupted"] < options.times and time.monotonic() < latest_s:
            times = min(OF_A_PROCESS, options.times - total["interrupted"])
            found = in_child(name, times, latest_s - time.monotonic(), seed)
            if found is None:
                failures += 1
                total["FAILED"] += 1
                print(f"FAILED: {name}, --seed {seed}", flush=True)
                if total["FAILED"] > 5:
                    break
            else:
                elsewhere = found.pop("dropped at")
                total.update(found)
                for where, count in elsewhere.items():
                    total[f"dropped at {where}"] += count
            seed += 1
        print(json.dumps({"program": name, **total}), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
