"""Ten small programs under random schedules: make test-stress.

Seeds that fail are printed with the command that repeats them. Every program runs in a process of its own,
which is started again after a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

SEEDS, LIMIT_S = range(1, 1001), 60.0  # of each program; of each seed


def prepare() -> None:
    import logging

    import torch

    from penstock.runtime import arena
    from tests.stress import delays

    faulthandler.enable()
    assert arena.unavailable() is None  # installed
    logging.getLogger("penstock").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    delays.install()


def serve(address: str, limit_s: float) -> None:
    """Be the other rank of `tests.stress.programs.ranks`: for each line, a seed and that of the delays."""
    import random

    from tests.stress import delays, leftovers, programs

    prepare()
    programs.join(address, 1)
    before = None
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        for line in sys.stdin:
            seed, delay = map(int, line.split())
            faulthandler.dump_traceback_later(max(limit_s, 60.0), exit=True)
            delays.begin(delay and delay + 1)
            programs.as_rank(random.Random(seed), place)
            delays.begin(0)
            if before is None:
                before = leftovers.settled(place)
            leftovers.check(before, place)
            print("passed", flush=True)
            faulthandler.cancel_dump_traceback_later()


def work(names: list[str], seeds: range, limit_s: float) -> None:
    """Run the programs with each seed in this process. The first failure ends it."""
    import gc
    import random

    from tests.stress import delays, leftovers
    from tests.stress.programs import PROGRAMS, happened

    prepare()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        for name in names:
            program = PROGRAMS[name]
            faulthandler.dump_traceback_later(max(limit_s, 60.0), exit=True)
            program(random.Random(0), place)  # what it makes once for all
            gc.collect()
            gc.freeze()
            before = leftovers.settled(place)
            for seed in seeds:
                print("began", name, seed, flush=True)
                faulthandler.dump_traceback_later(limit_s, exit=True)
                delays.begin(seed)
                try:
                    program(random.Random(seed), place)
                finally:
                    delays.begin(0)
                leftovers.check(before, place)
                print("passed", name, seed, flush=True)
            print("happened", name, dict(happened), file=sys.stderr, flush=True)
            happened.clear()
    faulthandler.cancel_dump_traceback_later()


def drive(name: str, seeds: range, limit_s: float) -> tuple[int, list[int]]:
    """Run the program with each seed in processes of their own; how many passed, and which failed."""
    passed, failed, begin = 0, [], seeds.start
    while begin < seeds.stop:
        seed = begin  # it may fail before it says so
        with tempfile.TemporaryFile("w+") as errors:
            command = [sys.executable, "-m", "tests.stress", "--work", "--programs", name]
            command += ["--seeds", f"{begin}:{seeds.stop}", "--limit", str(limit_s)]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
            watch = _watch(process, limit_s)
            for line in process.stdout or ():
                watch.cancel()
                watch = _watch(process, limit_s)
                what, _, number = line.split()
                seed = int(number)
                passed += what == "passed"
            status = process.wait()
            watch.cancel()
            _end(process)
            errors.seek(0)
            text = errors.read()
            if status == 0:
                print(*[line for line in text.splitlines() if line.startswith("happened")], sep="\n")
                break
            begin = seed + 1
            failed.append(seed)
            ended = f"signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"status {status}"
            print(
                f"FAILED: {name}, seed {seed}: {ended}\n{text[-12_000:]}\nto repeat: "
                f"{sys.executable} -m tests.stress --programs {name} --seeds {seed}:{begin}",
                flush=True,
            )
    return passed, failed


def _watch(process: subprocess.Popen[str], limit_s: float) -> threading.Timer:
    """It ends by itself where a seed takes too long; what it has left running may hold its output open."""
    timer = threading.Timer(max(limit_s, 60.0) + 30, _end, [process])
    timer.daemon = True
    timer.start()
    return timer


def _end(process: subprocess.Popen[str]) -> None:
    """End it, and what it has left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--programs", help="comma-separated; all unless told")
    parser.add_argument("--seeds", default=f"{SEEDS.start}:{SEEDS.stop}", help="BEGIN:END")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of each seed")
    parser.add_argument("--work", action="store_true", help="in this process, up to the first failure")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        serve(options.peer, options.limit)
        return 0
    seeds = range(*map(int, options.seeds.split(":")))
    from tests.stress.programs import PROGRAMS

    names = options.programs.split(",") if options.programs else list(PROGRAMS)
    if options.work:
        work(names, seeds, options.limit)
        return 0
    all_failed = 0
    for name in names:
        began_s = time.monotonic()
        passed, failed = drive(name, seeds, options.limit)
        all_failed += len(failed)
        print(
            f"{name}: {passed} seeds passed, {len(failed)} failed {failed or ''}, "
            f"{time.monotonic() - began_s:.0f} s",
            flush=True,
        )
    return 1 if all_failed else 0


if __name__ == "__main__":
    sys.exit(main())
