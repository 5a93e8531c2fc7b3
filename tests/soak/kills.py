"""Processes are killed at random moments of what they do: make test-kills N=1000.

    python -m tests.soak.kills --times N [--activities save,ranks] [--seconds MOST] [--seed S]

One process imports everything and forks the others; it starts no threads: set OMP_NUM_THREADS=1. Each begins
by looking at what the one before has left: it is old or new, and whole. Every few kills the next one is left
alone: it ends with the result of one that nobody disturbed, and nothing is left beside it.

Prints how many were killed, by activity. What failed is shown, and its folder is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import penstock
import penstock.runtime.run
from penstock import checkpoint, samples
from penstock.checkpoint import Manager, replace
from penstock.storage.objects import Bucket
from tests.support import packing_alone, saving
from tests.support.families import iterate, small_gpt
from tests.support.packing import contents, expected
from tests.support.runs import HARDWARE, PAGED, bits, state_bits

LEFT_ALONE_EVERY, LIMIT_S = 8, 60.0
GIVEN_UP_S = 3.0  # after which a launcher ends the ranks that are left


class Activity(NamedTuple):
    """What is killed. All are called with the activity's folder, in processes of their own.

    begin   what has to be there first
    work    what is killed; where the one before was killed, it goes on as users do
    whole   raises where what it finds is not whole
    ended   the same, when `work` has come to its end: it has the result, and nothing else is there
    ranks   processes that do it together, of which one is killed
    """

    begin: Callable[[Path], None]
    work: Callable[[Path], None]
    whole: Callable[[Path], None]
    ended: Callable[[Path], None]
    ranks: int = 1


def only(folder: Path, *names: str) -> None:
    """Nothing else is there."""
    left = sorted(set(os.listdir(folder)) - set(names))
    assert not left, f"left in {folder.name}: {left}"


def nothing(_: Path) -> None:
    pass


# -- one file --------------------------------------------------------------------------------------


def save(folder: Path) -> None:
    (folder / "out").mkdir(exist_ok=True)
    path = folder / "out" / "state"
    version = saving.version_of(path) + 1 if path.exists() else 0
    for each in range(version, version + 3):
        checkpoint.save(saving.state(each), path)


def save_hidden(folder: Path) -> None:
    replace._create_nameless = lambda *_: None  # as on a file system without nameless files
    save(folder)


def saved_is_whole(folder: Path) -> None:
    (folder / "out").mkdir(exist_ok=True)
    left = [name for name in os.listdir(folder / "out") if name != "state"]
    assert len(left) <= 1 and all(name.startswith(".state.") for name in left), left
    newest = folder / "newest"
    before = int(newest.read_text()) if newest.exists() else -1
    version = saving.version_of(folder / "out" / "state") if (folder / "out" / "state").exists() else -1
    assert version >= before, "what was saved is lost again"
    newest.write_text(str(version))


def saved(folder: Path) -> None:
    saved_is_whole(folder)
    only(folder / "out", "state")


# -- increments, in the background too -------------------------------------------------------------

FROZEN = torch.arange(100_000)


def manage(place: str) -> None:
    """Six checkpoints more."""
    with Manager(place, keep_last=2, keep_every=50) as manager:
        latest = manager.latest()
        step = 0 if latest is None else checkpoint.load(latest)["step"]
        for each in range(step + 1, step + 7):
            moving = torch.full((20_000,), each)
            # Every tenth step nearly all is new, so that files to refer to change.
            state = {"frozen": FROZEN + each // 10, "moving": moving, "step": each}
            manager.save(state, each, wait=each % 2 == 0)


def managed_is_whole(place: str, folder: Path) -> None:
    newest = folder / "newest"
    before = int(newest.read_text()) if newest.exists() else 0
    found = checkpoint.ls(place) if place.startswith("s3:") or Path(place).exists() else []
    assert not [each.problem for each in found if each.problem], found
    for each in found[-3:]:
        state = checkpoint.load(each.path)
        assert state["step"] == each.step and bool((state["moving"] == each.step).all())
        assert torch.equal(state["frozen"], FROZEN + each.step // 10)
    last = found[-1].step if found else 0
    assert last is not None and last >= before, f"step {before} is lost again, the newest is {last}"
    newest.write_text(str(last))


def managed(folder: Path) -> None:
    managed_is_whole(str(folder / "out"), folder)
    left = [name for name in os.listdir(folder / "out") if not name.startswith("step-")]
    assert left in ([], [".penstock.lock"]), left


# -- samples ---------------------------------------------------------------------------------------


def wanted_store(folder: Path) -> None:
    expected(folder / "wanted", packing_alone.ITEMS)


def pack(folder: Path) -> None:
    out = folder / "out"
    if (out / "packing.json").exists() or not (out / "store.json").exists():
        packing_alone.pack_to(out)


def packed_is_whole(folder: Path) -> None:
    if (folder / "out" / "store.json").exists():
        found = contents(folder / "out")
        found.pop("packing.json", None)  # goes last, or at the next packing
        assert found == contents(folder / "wanted")


def packed(folder: Path) -> None:
    assert contents(folder / "out") == contents(folder / "wanted")
    shutil.rmtree(folder / "out")


def upload(folder: Path) -> None:
    samples.upload(folder / "wanted", url(folder))


def uploaded_is_whole(folder: Path) -> None:
    bucket = Bucket(url(folder))
    if "store.json" in bucket.listed():
        uploaded(folder)


def uploaded(folder: Path) -> None:
    read_all(folder)
    bucket = Bucket(url(folder))
    bucket.delete(bucket.listed())


def read_all(folder: Path) -> None:
    with samples.mount(url(folder), cache_bytes="1MiB") as store:
        found = 0
        while (batch := store.bread(50)) is not None:
            for place, index in enumerate(batch.indices.tolist()):
                assert bytes(batch[place]) == packing_alone.ITEMS[index][1]
                found += 1
    assert found == len(packing_alone.ITEMS)


def url(folder: Path) -> str:
    return f"s3://penstock/kills/{folder.name}"


# -- training --------------------------------------------------------------------------------------


def train(folder: Path) -> None:
    """Three steps in a budget; the bits are compared with those in memory."""
    (folder / "spill").mkdir(exist_ok=True)
    model, optimizer = small_gpt()
    with penstock.offload(
        model,
        optimizer,
        device_budget="300KiB",
        spill_dir=folder / "spill",
        hardware=HARDWARE,
        planning=PAGED,
    ) as run:
        for step in range(3):
            with run.step():
                iterate(model, optimizer, step)
    expected_model, same = small_gpt()
    for step in range(3):
        iterate(expected_model, same, step)
    assert bits(model.parameters()) == bits(expected_model.parameters())


def spill_is_empty(folder: Path) -> None:
    (folder / "spill").mkdir(exist_ok=True)
    only(folder / "spill")


TUNED: dict[str, Any] = {
    "max_steps": 4,
    "block_size": 16,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "warmup_steps": 1,
    "weight_decay": 0.1,
}


def model_to_tune(folder: Path) -> None:
    from tests.support import finetuning

    config = {**finetuning.SMALL, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
    finetuning.make(folder / "model", config)
    (folder / "text").write_text(Path(finetuning.__file__).read_text()[:2000])
    losses, _ = finetuning.train(folder / "model", folder / "text", **TUNED)
    (folder / "losses").write_text(json.dumps(losses))


def tune(folder: Path) -> None:
    from penstock.integrations import finetune

    (folder / "spill").mkdir(exist_ok=True)
    options = penstock.options.FineTuneOptions(
        model=folder / "model", text=folder / "text", tokenizer="bytes", **TUNED
    )
    tuning = finetune.FineTuning(options, folder / "out")
    with penstock.offload(
        device_budget="3MiB", spill_dir=folder / "spill", hardware=HARDWARE, planning=PAGED
    ) as run:
        losses = tuning.losses() if tuning.is_finished else tuning.train(run, save_steps=1).losses
    (folder / "found").write_text(json.dumps(losses))


def tuned(folder: Path) -> None:
    assert json.loads((folder / "found").read_text()) == json.loads((folder / "losses").read_text())
    hidden = [path.name for path in (folder / "out").rglob(".*")]
    assert not hidden, hidden
    shutil.rmtree(folder / "out")
    spill_is_empty(folder)


# -- ranks -----------------------------------------------------------------------------------------

STEPS, WIDTH = 6, 64


def train_as_rank(folder: Path) -> None:
    """Goes on where the newest checkpoint is."""
    rank = int(os.environ["RANK"])
    (folder / "spill").mkdir(exist_ok=True)
    store = dist.FileStore(os.environ["MEETING"], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    with Manager(folder / f"out-{rank}", keep_last=STEPS) as manager:
        every = [None, None]
        dist.all_gather_object(every, max(manager.steps(), default=0))
        begin = min(step or 0 for step in every)  # the newest that both have
        found = _train(folder, rank, begin, manager)
    (folder / f"found-{rank}").write_text(found)
    dist.barrier()


def _train(folder: Path, rank: int, begin: int, manager: Manager | None) -> str:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with contextlib.ExitStack() as stack:
        step_of: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if manager is not None:
            run = penstock.offload(
                model,
                optimizer,
                device_budget="256KiB",
                spill_dir=folder / "spill",
                hardware=HARDWARE,
                planning=PAGED,
            )
            step_of = stack.enter_context(run).step
            if begin:
                path = folder / f"out-{rank}" / f"step-{begin:010d}.safetensors"
                state = checkpoint.load(path, mmap=False)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
        for step in range(begin, STEPS):
            with step_of():
                x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if manager is not None and step + 1 not in manager.steps():
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                manager.save(state, step + 1, wait=step % 2 == 0)
        found = b"".join(bits(model.parameters()) + state_bits(optimizer))
    return found.hex()


def train_ranks_in_memory(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    store = dist.FileStore(os.environ["MEETING"], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    (folder / f"wanted-{rank}").write_text(_train(folder, rank, 0, None))
    dist.barrier()


def ranks_are_whole(folder: Path) -> None:
    for rank in range(2):
        place = folder / f"out-{rank}"
        for each in checkpoint.ls(place) if place.exists() else []:
            assert not each.problem, each
            checkpoint.verify(each.path)
    spill_is_empty(folder)


def ranks_ended(folder: Path) -> None:
    ranks_are_whole(folder)
    for rank in range(2):
        assert (folder / f"found-{rank}").read_text() == (folder / f"wanted-{rank}").read_text()
        shutil.rmtree(folder / f"out-{rank}")


ACTIVITIES = {
    "save": Activity(nothing, save, saved_is_whole, saved),
    "save, no nameless files": Activity(nothing, save_hidden, saved_is_whole, saved),
    "manager": Activity(
        nothing,
        lambda folder: manage(str(folder / "out")),
        lambda folder: managed_is_whole(str(folder / "out"), folder),
        managed,
    ),
    "manager at a URL": Activity(
        nothing,
        lambda folder: manage(url(folder)),
        lambda folder: managed_is_whole(url(folder), folder),
        lambda folder: managed_is_whole(url(folder), folder),
    ),
    "pack": Activity(wanted_store, pack, packed_is_whole, packed),
    "upload": Activity(wanted_store, upload, uploaded_is_whole, uploaded),
    "offload": Activity(nothing, train, spill_is_empty, spill_is_empty),
    "finetune": Activity(model_to_tune, tune, spill_is_empty, tuned),
    "ranks": Activity(train_ranks_in_memory, train_as_rank, ranks_are_whole, ranks_ended, ranks=2),
}


# -- processes -------------------------------------------------------------------------------------


class Failed(Exception):
    """A process that should have ended did not, or not well."""


class Started:
    """Processes that look at what the ones before have left, and then work."""

    def __init__(self, activity: Activity, folder: Path) -> None:
        self._folder, meeting = folder, folder / f"meeting-{time.monotonic_ns()}"
        self._looked, tell = os.pipe()
        (folder / "said").write_bytes(b"")
        self.processes = [self._start(activity, rank, meeting, tell) for rank in range(activity.ranks)]
        os.close(tell)
        for _ in self.processes:
            if not os.read(self._looked, 1):
                self.end()
        self.began_s = time.monotonic()

    def _start(self, activity: Activity, rank: int, meeting: Path, tell: int) -> int:
        if process := os.fork():
            return process
        code = 1
        try:
            os.environ |= {"RANK": str(rank), "MEETING": str(meeting)}
            tempfile.tempdir = str(self._folder / "tmp")
            with (self._folder / "said").open("ab") as said:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
            activity.whole(self._folder)
            os.write(tell, b"1")
            os.close(tell)
            activity.work(self._folder)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def kill(self, which: int) -> bool:
        """Whether it was still there. The others have a moment to end by themselves."""
        killed = self.processes.pop(which)
        os.kill(killed, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1])
        for process in self.processes:
            _wait(process, GIVEN_UP_S)
        os.close(self._looked)
        if code not in (0, -signal.SIGKILL) and not self.processes:
            raise Failed(f"{code}: {(self._folder / 'said').read_text()[-3000:]}")
        return code == -signal.SIGKILL

    def end(self) -> float:
        """Let them come to their end; the seconds that it took. Raises Failed with what they said."""
        codes = [_wait(process, LIMIT_S) for process in self.processes]
        if any(codes) or None in codes:
            raise Failed(f"{codes}: {(self._folder / 'said').read_text()[-3000:]}")
        os.close(self._looked)
        return time.monotonic() - self.began_s


def _wait(process: int, limit_s: float) -> int | None:
    """Its exit code; None where it did not end in time, and was killed."""
    latest_s = time.monotonic() + limit_s
    while time.monotonic() < latest_s:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def repeat(name: str, folder: Path, times: int, seconds: float, draw: random.Random) -> dict[str, int]:
    """Kill it so many times, or for so long."""
    activity = ACTIVITIES[name]
    (folder / "tmp").mkdir(parents=True)
    counts = {"killed": 0, "over before": 0, "begun and ended": 0}

    def through(work: Callable[[Path], None], ranks: int = 1) -> float:
        return Started(Activity(nothing, work, nothing, nothing, ranks), folder).end()

    def to_the_end() -> float:
        took_s = Started(activity, folder).end()
        through(activity.ended)
        only(folder / "tmp")
        for meeting in folder.glob("meeting-*"):
            meeting.unlink()
        return took_s

    through(activity.begin, activity.ranks)
    length_s = to_the_end()
    latest_s = time.monotonic() + seconds
    while counts["killed"] < times and time.monotonic() < latest_s:
        started = Started(activity, folder)
        time.sleep(draw.uniform(0, length_s))
        counts["killed" if started.kill(draw.randrange(activity.ranks)) else "over before"] += 1
        if draw.randrange(LEFT_ALONE_EVERY) == 0:
            length_s = 0.8 * length_s + 0.2 * to_the_end()
            counts["begun and ended"] += 1
    to_the_end()
    return counts


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[None]:
    """The environment leads to a server of objects. Another process starts it: clients have threads."""
    from tests.support.object_servers import shared_seaweed

    (begun, tell), (over, end_it) = os.pipe(), os.pipe()
    process = os.fork()
    if process == 0:
        os.close(end_it)
        with shared_seaweed(folder) as server:
            os.write(tell, json.dumps(server.environment).encode())
            os.read(over, 1)
        os._exit(0)
    os.close(over)
    os.environ |= json.loads(os.read(begun, 1 << 16))
    try:
        yield
    finally:
        os.close(end_it)
        os.waitpid(process, 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.kills", description=__doc__)
    parser.add_argument("--times", type=int, default=100, help="of each activity")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most, of each activity")
    parser.add_argument("--activities", help="comma-separated beginnings of names; all unless told")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("penstock").setLevel(logging.ERROR)
    wanted = options.activities.split(",") if options.activities else [""]
    gc.freeze()  # what was imported stays where it is in all of them
    names = [name for name in ACTIVITIES if any(name.startswith(each) for each in wanted)]
    if "finetune" in names:
        import transformers  # noqa: F401  once, for all

        from penstock.integrations import finetune  # noqa: F401
    failed = 0
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="kills-"))
        if any(name in ("upload", "manager at a URL") for name in names):
            stack.enter_context(seaweed(folder))
        for number, name in enumerate(names):
            place, began_s = folder / f"{number}-{name.replace(' ', '-').replace(',', '')}", time.monotonic()
            try:
                found: dict[str, Any] = repeat(
                    name, place, options.times, options.seconds, random.Random(options.seed)
                )
                shutil.rmtree(place)
            except (Failed, AssertionError) as error:
                failed += 1
                found = {"FAILED": str(error), "kept": str(place)}
            print(json.dumps({"activity": name, **found, "s": round(time.monotonic() - began_s)}), flush=True)
    if not failed:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
