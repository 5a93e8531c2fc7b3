"""The training of the soak: one process for as long as it takes, in a budget or in memory.

    python -m tests.soak.training FOLDER [SPILL_DIR]

Trains a small GPT on samples of a store, some of them longer or shorter, and evaluates now and then. With a
spill directory it goes on for ever in a budget and saves; where the disk is full it goes on from its newest
checkpoint. Without one it trains in memory to the step that it is asked for.

For each line on its input it prints one JSON object: the step, a digest of everything that training made,
and in a budget what is in use. "row" does only that, "reopen" also closes the run and begins another one.
At the end of its input it closes the run and prints the last one.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import os
import random
import select
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import penstock
from penstock import samples
from penstock.checkpoint import Manager
from penstock.runtime import arena
from tests.support.families import _Gpt
from tests.support.runs import PAGED

BUDGET = "2MiB"
WORDS, BATCH, LENGTH, LENGTHS = 64, 4, 48, (16, 40, 56, 64)
EVALUATED_EVERY, SAVED_EVERY = 50, 40
FULL_S = 120.0  # the disk is not full for longer


class Training:
    """What is trained, and how far it is."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(3)
        self.model = _Gpt(dropout=0.1, width=64, blocks=3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.loader = samples.Loader(
            samples.mount(folder / "store", cache_bytes="1MiB"), batch_size=BATCH, seed=5, drop_last=True
        )
        self.step, self.chain = 0, ""  # a digest of all losses so far
        self._batches: Iterator[Any] = iter(())

    def iterate(self) -> None:
        """One step: forward, backward and the optimizer's."""
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self.loader)
            batch = next(self._batches)
        draw = random.Random(self.step)
        length = draw.choice(LENGTHS) if self.step % 10 == 9 else LENGTH
        loss = self._loss(batch["words"][:, :length].long())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self._note(loss)

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            words = torch.randint(
                0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(self.step)
            )
            self._note(self._loss(words))
        self.model.train()

    def _loss(self, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    def _note(self, loss: torch.Tensor) -> None:
        self.chain = hashlib.sha256(self.chain.encode() + loss.detach().numpy().tobytes()).hexdigest()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),
            "generator": torch.get_rng_state(),
            "step": self.step,
            "chain": self.chain,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.zero_grad()
        self.loader.load_state_dict(state["loader"])
        self._batches = iter(self.loader)
        torch.set_rng_state(state["generator"])
        self.step, self.chain = state["step"], state["chain"]
        self.model.train()

    def digest(self) -> str:
        found = hashlib.sha256(self.chain.encode() + torch.get_rng_state().numpy().tobytes())
        states = [value for each in self.optimizer.state.values() for value in each.values()]
        for tensor in (*self.model.parameters(), *states):
            found.update(tensor.detach().clone().numpy().tobytes())
        return found.hexdigest()


def in_memory(training: Training) -> None:
    for line in sys.stdin:
        while training.step < int(line):
            training.iterate()
            if training.step % EVALUATED_EVERY == 0:
                training.evaluate()
        print(json.dumps({"step": training.step, "digest": training.digest()}), flush=True)


class Soaked:
    """The training in a budget, and its runs one after the other."""

    def __init__(self, folder: Path, spill: str) -> None:
        self.training, self.spill = Training(folder), spill
        self.manager = Manager(folder / "checkpoints", keep_last=2)
        self.happened = {"full": 0, "loaded": 0, "saved": 0, "evaluated": 0, "opened": 0, "refused": 0}
        self.manager.save(self.training.state(), 0, wait=True)
        self.run = self._open()

    def _open(self) -> penstock.Offload:
        while True:
            try:
                run = penstock.offload(
                    self.training.model,
                    self.training.optimizer,
                    device_budget=BUDGET,
                    spill_dir=self.spill,
                    planning=PAGED,
                )
            except penstock.SpillError:  # the disk is full just now
                self.happened["refused"] += 1
                time.sleep(1)
            else:
                self.happened["opened"] += 1
                return run

    def forward(self) -> None:
        """A step, and what is due after it; where the disk is full, from the newest checkpoint on."""
        try:
            with self.run.step():
                self.training.iterate()
            if self.training.step % EVALUATED_EVERY == 0:
                with self.run.step(kind="evaluation"):
                    self.training.evaluate()
                self.happened["evaluated"] += 1
            newest = self.manager.steps()[-1]
            if self.training.step % SAVED_EVERY == 0 and self.training.step > newest:
                number = self.training.step // SAVED_EVERY
                self.manager.save(self.training.state(), self.training.step, wait=number % 2 == 0)
                self.happened["saved"] += 1
        except penstock.SpillSpaceFull:
            self.happened["full"] += 1
        else:
            return
        self._load()  # when the error is gone, and what its traceback holds of the step

    def _load(self) -> None:
        self.manager.wait()
        latest_s = time.monotonic() + FULL_S
        while True:
            try:
                self.training.load(penstock.load(self.manager.latest(), mmap=False))
            except (penstock.PenstockError, RuntimeError):  # a module's own, of what its parameters met
                if time.monotonic() > latest_s:
                    raise
                time.sleep(1)
            else:
                self.happened["loaded"] += 1
                return

    def reopen(self) -> None:
        self.run.close()
        self.run = self._open()

    def row(self) -> dict[str, Any]:
        """How far it is, and what is in use."""
        self.manager.wait()
        while True:
            try:
                digest = self.training.digest()
            except penstock.SpillSpaceFull:
                time.sleep(1)
            else:
                break
        report = None
        if not self.run.closed:
            with contextlib.suppress(penstock.PenstockError):  # no step of the run has ended yet
                report = self.run.report()
        return {
            "step": self.training.step,
            "digest": digest,
            "figures": figures(self.run, self.spill),
            "happened": self.happened,
            "peak_bytes": report and report.peak_bytes,
            "evicted_bytes": report and report.evicted_bytes,
        }


def figures(run: penstock.Offload, spill: str) -> dict[str, int]:
    """What a leak would let grow. Sizes in bytes. A solver at work has memory that it gives back."""
    for thread in threading.enumerate():
        if thread.name == "penstock-planning":
            thread.join()
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    disk, stats = os.statvfs(spill), arena.stats()
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names.append((task / "comm").read_text().strip())
    return {
        "resident": int(status["VmRSS"].split()[0]) << 10,
        "anonymous": int(status["RssAnon"].split()[0]) << 10,
        "address space": int(status["VmSize"].split()[0]) << 10,
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sum(
            not name.startswith("iou-wrk") for name in names
        ),  # the kernel keeps those as it likes
        "objects": len(gc.get_objects()),
        "blocks": sys.getallocatedblocks(),
        "arena": stats.in_use_bytes,
        "spilled": 0 if run.closed else run._spill.used_bytes,
        "on disk": (disk.f_blocks - disk.f_bfree) * disk.f_frsize,
    }


def main(folder: Path, spill: str | None = None) -> None:
    torch.set_num_threads(1)
    logging.getLogger("penstock").setLevel(logging.ERROR)
    if spill is None:
        in_memory(Training(folder))
        return
    soaked = Soaked(folder, spill)
    while True:
        soaked.forward()
        while select.select([sys.stdin], [], [], 0)[0]:
            line = sys.stdin.readline()
            if not line:
                soaked.run.close()
            print(json.dumps(soaked.row()), flush=True)
            if not line:
                soaked.manager.close()
                return
            if line == "reopen\n":
                soaked.reopen()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
