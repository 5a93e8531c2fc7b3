"""What penstock does with files, as small programs: each prepares a folder, acts there, and is looked at.

What they return is compared: it says which bits came of it. Errors pass through.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # optimizers ask for it

import penstock
import penstock.runtime.run  # now, and not in each child
from penstock import Hardware, checkpoint, samples
from penstock.checkpoint import failures, pieces
from penstock.errors import InvalidArgument, SampleError
from penstock.options import IoOptions
from penstock.runtime.copy_engine import CopyEngine
from penstock.samples.writing import Background
from penstock.storage.nvme import lease
from penstock.storage.objects import Bucket
from penstock.storage.spill import SpillSpace
from tests.support.packing import Listed, pack_often
from tests.support.runs import HARDWARE, PAGED
from tests.support.sample_stores import some_samples
from tests.support.states import numbers, same
from tests.support.stores import write_store

torch.set_num_threads(1)  # a forked child has none of its parent's
lease._landing_s = lambda there, takeover: 0.0  # what a process had sent that was killed has landed
LIMIT_S = 1.0  # in place of a minute and more: when a wait ends
REMOTE_S = 4.0  # and one for a server
OLD = {"weights": numbers(40_000), "momentum": numbers(30_000, torch.float64), "step": 1}
NEW = {"weights": numbers(40_000, seed=1), "momentum": OLD["momentum"], "step": 2}
SAMPLES = some_samples(40)
OTHERS = some_samples(30, seed=1)


class Activity(NamedTuple):
    """Something that the product does in a folder.

    prepare   makes what is there before
    act       does it; what it returns is always the same. May be repeated after a failure
    problems  what is not as it must be afterwards; `went_well`: `act` returned
    names     of all that may be in the folder afterwards
    begun     of what may be there too after a failure, from which it goes on
    touches   memory whose bytes are on the disk: where they are lost for good, the process ends
    remote    makes what is at `url` before, which is another one each time
    """

    prepare: Callable[[Path], None]
    act: Callable[[Path], str]
    problems: Callable[[Path, bool], Iterable[str]]
    names: frozenset[str]
    begun: frozenset[str] = frozenset()
    touches: bool = False
    remote: Callable[[Path], None] | None = None


def move_small_pieces() -> None:
    """Checkpoints are moved in many pieces."""
    pieces.PIECE_BYTES = 64 << 10
    pieces._spare.clear()


def end_waits_soon() -> None:
    """Waits that would last minutes end after `LIMIT_S`."""
    failures.TIMEOUT_S = pieces.TIMEOUT_S = LIMIT_S
    Bucket.__init__.__defaults__ = (REMOTE_S,)
    for function in (CopyEngine.__init__, SpillSpace.__init__, Background.__init__):
        defaults = function.__defaults__ or ()
        function.__defaults__ = tuple(
            LIMIT_S if isinstance(each, float) and each > 60 else each for each in defaults
        )
        for name, value in (function.__kwdefaults__ or {}).items():
            if isinstance(value, float) and value > 60:
                function.__kwdefaults__[name] = LIMIT_S


def digest(state: Any) -> str:
    """Of all bits of a state of tensors."""
    found = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        found.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    return found.hexdigest()


# Training.


def _nothing(folder: Path) -> None:
    pass


def _none(folder: Path, went_well: bool) -> Iterable[str]:
    return ()


def _training(io: str | None) -> Activity:
    """Steps of a model whose weights, gradients and optimizer state are four times the budget; on a drive of
    another machine where there is no `io`."""

    def act(folder: Path) -> str:
        torch.manual_seed(0)
        options: dict[str, Any] = {"hardware": HARDWARE, "planning": PAGED, "spill_dir": drive()}
        if io is not None:
            options |= {"io": IoOptions(paths=[io]), "spill_dir": folder}
        with penstock.offload(device_budget="1536KiB", **options) as run:
            model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
            optimizer = torch.optim.AdamW(model.parameters())
            for number in range(3):
                with run.step():
                    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(number))
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return digest(model.state_dict())

    return Activity(_nothing, act, _none, frozenset(), touches=True)


# Checkpoints.


def _save_old(folder: Path) -> None:
    checkpoint.save(OLD, folder / "state")


def _saving(io: str | None, wait: bool = True) -> Activity:
    options = None if io is None else IoOptions(paths=[io])

    def act(folder: Path) -> str:
        if handle := checkpoint.save(NEW, folder / "state", io=options, wait=wait):
            handle.wait()
        return ""

    return Activity(_save_old, act, _old_or_new, frozenset({"state"}))


def _old_or_new(folder: Path, went_well: bool) -> Iterable[str]:
    found = checkpoint.load(folder / "state", mmap=False)
    if not same(found, NEW) and (went_well or not same(found, OLD)):
        yield "the file is not the new state" + " nor the old one" * (not went_well)


def _loading(**options: Any) -> Activity:
    def act(folder: Path) -> str:
        if options.get("into"):
            target = {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in NEW.items()
            }
            return digest(checkpoint.load(folder / "state", **{**options, "into": target}))
        return digest(checkpoint.load(folder / "state", **options))

    return Activity(_save_old, act, lambda folder, went_well: [], frozenset({"state"}))


def _verify(folder: Path) -> str:
    return repr(checkpoint.verify(folder / "state"))


def state_of(step: int) -> dict[str, Any]:
    """What a run of checkpoints has at a step: part of it never changes."""
    return {"frozen": OLD["momentum"], "weights": numbers(20_000, seed=step), "step": step}


def _begin_run(folder: Path) -> None:
    with checkpoint.Manager(folder / "run", keep_last=2) as manager:
        for step in (1, 2):
            manager.save(state_of(step), step, wait=True)


def _go_on(folder: Path) -> str:
    step = 1 + max(int(name[5:15]) for name in os.listdir(folder / "run") if name.startswith("step-"))
    with checkpoint.Manager(folder / "run", keep_last=2) as manager:
        manager.save(state_of(step), step).wait()
    return ""


def _run_is_whole(folder: Path, went_well: bool) -> Iterable[str]:
    with checkpoint.Manager(folder / "run") as manager:
        steps = manager.steps()
        if not steps or steps[-1] < 2 + went_well:
            yield f"the newest step is none of what was saved: {steps}"
        for step in steps:
            if not same(checkpoint.load(folder / "run" / f"step-{step:010}.safetensors"), state_of(step)):
                yield f"step {step} has other bits"
    hidden = [name for name in os.listdir(folder / "run") if name.endswith(".penstock")]
    if hidden:
        yield f"{hidden} was left"


# Samples.


def packing(content: list[tuple[str, bytes]], **options: Any) -> Callable[[Path], str]:
    def act(folder: Path) -> str:
        try:
            pack_often(Listed(content), folder / "store", data_file_bytes=70_000, **options)
        except InvalidArgument as error:
            if "is already a store" not in str(error):
                raise
        return ""

    return act


def holds(folder: Path, content: list[tuple[str, bytes]]) -> bool:
    return content_of(folder / "store") == content


def content_of(place: Path | str) -> list[tuple[str, bytes]]:
    with samples.mount(place, timeout_s=REMOTE_S) as store:
        return [(name, bytes(store.read(name))) for name in store.names()]


def _packed(folder: Path, went_well: bool) -> Iterable[str]:
    whole = (folder / "store" / "store.json").exists()
    if went_well and not whole:
        yield "there is no store"
    begun = (folder / "store" / "packing.json").exists()
    if whole and not begun and not holds(folder, SAMPLES):
        yield "the store has other samples"


def _replaced(folder: Path, went_well: bool) -> Iterable[str]:
    if not holds(folder, OTHERS) and (went_well or not holds(folder, SAMPLES)):
        yield "the store is neither the old one nor the new one"


def read_all(folder: Path | str, **options: Any) -> str:
    """All batches of an epoch, and some samples by name."""
    found = hashlib.sha256()
    with samples.mount(folder, cache_bytes="64KiB", **options) as store:
        store.sequence(epoch=1, seed=3)
        while (batch := store.bread(7)) is not None:
            found.update(batch.indices.tobytes() + batch.data.tobytes())
        for name, _ in SAMPLES[::9]:
            found.update(bytes(store.read(name)))
    return found.hexdigest()


def _read_cached(folder: Path) -> str:
    return read_all(os.environ["PENSTOCK_FAULTS_URL"], cache_dir=folder / "cache", timeout_s=LIMIT_S)


def _unpack(folder: Path) -> str:
    samples.unpack(folder / "store", folder / "files", overwrite=True)
    return ""


def _unpacked(folder: Path, went_well: bool) -> Iterable[str]:
    for name, data in SAMPLES if went_well else ():
        if (folder / "files" / name).read_bytes() != data:
            yield f"{name} has other bytes"


# Drives of other machines.


def drive() -> str:
    """The URL of a namespace, which is nobody else's."""
    return os.environ.get("PENSTOCK_FAULTS_DRIVE", "")


def _with_both_stores(folder: Path) -> None:
    for name, content in (("store", SAMPLES), ("other", OTHERS)):
        write_store(folder / name, content)


def _put_other(folder: Path) -> None:
    samples.upload(folder / "other", drive(), overwrite=True)


def _replace_on_drive(folder: Path) -> str:
    samples.upload(folder / "store", drive(), overwrite=True, timeout_s=REMOTE_S)
    return ""


def _replaced_on_drive(folder: Path, went_well: bool) -> Iterable[str]:
    try:
        there = content_of(drive())
    except SampleError as error:
        if went_well:
            yield f"there is no store: {error}"
        return
    if there != SAMPLES and (went_well or there != OTHERS):
        yield "the store on the drive has other samples"


# Object stores.


def url() -> str:
    """Below which all lies that an activity has in the object store."""
    return os.environ.get("PENSTOCK_FAULTS_OBJECTS", "") + os.environ.get("PENSTOCK_FAULTS_RUN", "")


def _upload(folder: Path) -> str:
    samples.upload(folder / "store", url(), timeout_s=REMOTE_S)
    return ""


def _uploaded(folder: Path, went_well: bool) -> Iterable[str]:
    try:
        if read_all(url(), timeout_s=REMOTE_S) != read_all(folder / "store"):
            yield "the store at the URL has other samples"
    except SampleError as error:
        if went_well:
            yield f"there is no store: {error}"


def _save_old_there(folder: Path) -> None:
    checkpoint.save(OLD, f"{url()}/state")


def _save_there(folder: Path) -> str:
    checkpoint.save(NEW, f"{url()}/state")
    return ""


def _old_or_new_there(folder: Path, went_well: bool) -> Iterable[str]:
    found = checkpoint.load(f"{url()}/state")
    if not same(found, NEW) and (went_well or not same(found, OLD)):
        yield "the object is not the new state" + " nor the old one" * (not went_well)
    if (names := set(Bucket(url()).listed())) != {"state"}:
        yield f"{names} was left"


# Small files.


def _save_value(folder: Path) -> str:
    HARDWARE.save(folder / "hardware.json")
    return ""


def _save_value_first(folder: Path) -> None:
    HARDWARE.save(folder / "hardware.json")


def _value_is_there(folder: Path, went_well: bool) -> Iterable[str]:
    if Hardware.load(folder / "hardware.json") != HARDWARE:
        yield "the file has another value"


def _with_store(folder: Path) -> None:
    packing(SAMPLES)(folder)


ACTIVITIES = {
    "training, io_uring direct": _training("io_uring direct"),
    "training, posix staged": _training("posix staged"),
    "save, io_uring direct": _saving(None),
    "save, io_uring buffered": _saving("io_uring buffered"),
    "save, posix direct": _saving("posix direct"),
    "save, posix buffered": _saving("posix buffered"),
    "save, wait=False": _saving(None, wait=False),
    "load, read": _loading(mmap=False),
    "load, mapped": _loading(mmap=True),
    "load, into": _loading(into=True),
    "verify": Activity(_save_old, _verify, _none, frozenset({"state"})),
    "Manager, increments": Activity(_begin_run, _go_on, _run_is_whole, frozenset({"run"})),
    "samples pack": Activity(_nothing, packing(SAMPLES), _packed, frozenset({"store"})),
    "samples pack, overwrite": Activity(
        _with_store,
        packing(OTHERS, overwrite=True),
        _replaced,
        frozenset({"store"}),
        frozenset({".store.packing"}),
    ),
    "samples mount, read": Activity(
        _with_store, lambda folder: read_all(folder / "store", timeout_s=LIMIT_S), _none, frozenset({"store"})
    ),
    "samples cache": Activity(_nothing, _read_cached, _none, frozenset({"cache"})),
    "samples unpack": Activity(_with_store, _unpack, _unpacked, frozenset({"store", "files"})),
    "drive, training": _training(None),
    "drive, upload": Activity(
        _with_both_stores,
        _replace_on_drive,
        _replaced_on_drive,
        frozenset({"store", "other"}),
        remote=_put_other,
    ),
    "objects, upload": Activity(_with_store, _upload, _uploaded, frozenset({"store"}), remote=_nothing),
    "objects, read": Activity(
        _with_store,
        lambda folder: read_all(url(), timeout_s=REMOTE_S),
        _none,
        frozenset({"store"}),
        remote=lambda folder: _upload(folder) and None,
    ),
    "objects, save": Activity(_nothing, _save_there, _old_or_new_there, frozenset(), remote=_save_old_there),
    "objects, load": Activity(
        _nothing,
        lambda folder: digest(checkpoint.load(f"{url()}/state")),
        _none,
        frozenset(),
        remote=_save_old_there,
    ),
    "values": Activity(_save_value_first, _save_value, _value_is_there, frozenset({"hardware.json"})),
}  # fmt: skip
