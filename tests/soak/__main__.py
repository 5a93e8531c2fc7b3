"""Training for hours beside neighbours that are no good: make soak HOURS=1.

One process trains in a budget all the time (`tests.soak.training`), evaluates, saves, and takes samples.
Its disk is small, and is filled, freed, slowed and let go; memory is taken and given back; two ranks train
beside it, of which one is killed and both are restarted. Every minute the digest of all that it has trained
is compared with the one of a process that takes the same steps in memory. Every ten minutes the run is
closed and another one is begun, and what is in use is noted: from the second of these rows to the last it
must not grow by more than GROWTH says.

Prints a row a line, and at the end a verdict and what has happened. Exit status 1 where a bit differs,
something grows, or ranks do not go on. The disk needs root; where there can be none of it, the training
uses a directory, which is neither filled nor slowed, and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from penstock import samples
from tests.soak.neighbours import ROOT, Ranks, Throttle, filled, small_disk, taken

ROW_S, COMPARED_S = 600.0, 60.0
SAMPLES, LENGTH, WORDS = 1000, 65, 64
DISK_BYTES, TAKEN_BYTES, SLOW_BYTES_PER_S = 64 << 20, 1 << 30, 2 << 20

# How much more may be in use in the last row than in the second one, absolutely and as a share of the second.
GROWTH: dict[str, tuple[float, float]] = {
    "resident": (16 << 20, 0.0),
    "anonymous": (16 << 20, 0.0),
    "address space": (256 << 20, 0.0),
    "mappings": (50, 0.0),
    "descriptors": (4, 0.0),
    "threads": (4, 0.0),
    "objects": (2000, 0.01),
    "blocks": (5000, 0.01),
    "arena": (1 << 20, 0.0),
    "spilled": (1 << 20, 0.0),
    "on disk": (8 << 20, 0.0),
}


class Trainer:
    """A process of `tests.soak.training`."""

    def __init__(self, *arguments: Path) -> None:
        command = [sys.executable, "-m", "tests.soak.training", *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the training ended by itself, with status {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> str:
        """Its last words."""
        said, _ = self.process.communicate(timeout=300)
        assert self.process.returncode == 0, self.process.returncode
        return said


class Soak:
    def __init__(self, folder: Path, spill: Path, throttle: bool) -> None:
        self.spill = spill
        self.trainer, self.reference = Trainer(folder, spill), Trainer(folder)
        self.throttle = Throttle(spill, self.trainer.process.pid) if throttle else None
        self.ranks = Ranks(folder / "ranks", pause_s=120)
        self.rows: list[dict[str, Any]] = []
        self.events: Counter[str] = Counter()
        self.wrong: list[str] = []

    def compare(self, what: str, minute: float) -> dict[str, int]:
        """The bits so far; what is in use. ``what`` is asked of the training."""
        found = self.trainer.ask(what)
        wanted = self.reference.ask(str(found["step"]))
        # Where the disk was full, it began again at a step that the one in memory has left behind.
        comparable = found["step"] == wanted["step"]
        self.events["compared" if comparable else "behind"] += 1
        same = found["digest"] == wanted["digest"] if comparable else None
        if same is False:
            self.wrong.append(f"the bits after step {found['step']} are others")
        row = {"minute": round(minute, 1), "step": found["step"], "same bits": same, "asked": what}
        print(json.dumps({**row, **found["figures"], **found["happened"]}), flush=True)
        return found["figures"]

    def disturb(self, draw: random.Random) -> None:
        """For some seconds. Without a small disk, only memory is taken."""
        event = draw.choice(["fill", "slow", "take"] if self.throttle else ["take"])
        self.events[event] += 1
        if event == "take":
            disturbing = taken(TAKEN_BYTES)
        elif event == "fill" or self.throttle is None:
            disturbing = filled(self.spill)
        else:
            disturbing = self.throttle.slow(SLOW_BYTES_PER_S)
        with disturbing:
            time.sleep(draw.uniform(2, 10))

    def verdict(self) -> list[str]:
        """What is wrong."""
        found = [*self.wrong, *self.ranks.failed, *grown(self.rows)]
        return found if self.ranks.rounds else [*found, "no ranks were killed"]


def grown(rows: list[dict[str, int]]) -> list[str]:
    """What has, from the second row to the last, beyond `GROWTH`."""
    if len(rows) < 3:
        return [f"{len(rows)} rows tell nothing of growth: soak for longer"]
    found = []
    for name, (absolute, share) in GROWTH.items():
        second, last = rows[1][name], rows[-1][name]
        most = second + absolute + share * second
        if last > most:
            found.append(f"{name} grew from {second} to {last}, above {most:.0f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--row", type=float, default=ROW_S, help="seconds from one row to the next")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--folder", help="where it works; the system's directory for temporary files unless told"
    )
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-", dir=options.folder)))
        words = np.random.default_rng(0).integers(0, WORDS, (SAMPLES, LENGTH))
        samples.pack({"words": words.astype(np.uint8)}, folder / "store")
        try:
            spill, small = stack.enter_context(small_disk(folder, DISK_BYTES)), True
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no small disk can be had here, so that none is filled or slowed: {error}", flush=True)
            spill, small = folder / "spill", False
            spill.mkdir()
        soak = Soak(folder, spill, small)
        stack.callback(soak.ranks.close)
        if soak.throttle is not None:
            stack.callback(soak.throttle.close)
        for each in (soak.trainer, soak.reference):
            stack.callback(each.process.wait)
            stack.callback(each.process.kill)
        begin_s = time.monotonic()
        end_s, row_s, compared_s = begin_s + 3600 * options.hours, begin_s + options.row, begin_s
        while (now_s := time.monotonic()) < end_s:
            if now_s >= row_s:
                soak.rows.append(soak.compare("row", (now_s - begin_s) / 60))
                # The disk is full as the next run begins, and a moment longer.
                with filled(spill) if small else contextlib.nullcontext():
                    soak.compare("reopen", (now_s - begin_s) / 60)
                    time.sleep(3)
                row_s += options.row
            elif now_s >= compared_s:
                soak.compare("row", (now_s - begin_s) / 60)
                compared_s = now_s + COMPARED_S
            soak.disturb(draw)
            time.sleep(draw.uniform(2, 10))
        soak.rows.append(soak.compare("row", (time.monotonic() - begin_s) / 60))
        print(soak.trainer.end(), end="")
        soak.reference.end()
        soak.ranks.close()
        wrong = soak.verdict()
        print(json.dumps({**soak.events, "rounds of ranks": soak.ranks.rounds, "rows": len(soak.rows)}))
        print("\n".join(wrong) if wrong else "equal bits, and nothing has grown")
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
