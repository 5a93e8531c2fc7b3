"""What a disk may hold after power was lost, and what must be found there.

A recording of a file system is cut at any point. What was synced before is there. Of the rest each write,
each size and each name is there, or not, or of a write some sectors: POSIX promises no more. A change of
names is one step, as file systems with a journal make it, and durable when all its folders were synced
since; the fsync of a file does not make its name durable.
"""

from __future__ import annotations

import itertools
import os
import random
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock import Hardware, checkpoint, samples
from penstock.errors import SampleError
from penstock.options import IoOptions
from penstock.samples.remote.local import local_store
from penstock.samples.remote.store import read_bytes, read_store
from penstock.samples.remote.upload import upload_to
from penstock.storage.nvme import lease
from tests.faults import activities
from tests.faults.activities import OTHERS, SAMPLES, state_of
from tests.faults.filesystem import MARK, Event
from tests.support.devices import MemoryDevice
from tests.support.nvme_target.process import NQN, Namespace, Subsystem, Target
from tests.support.runs import HARDWARE
from tests.support.states import same
from tests.support.stores import write_store

SECTOR_BYTES = 512
ROOT = 1
Saved = dict[int, Any]  # by inode, mode and content: bytes, or of a folder the inodes by name
Mark = Callable[[str], None]


class Crash(NamedTuple):
    """Power is lost after so many events; `seed` draws what of the unsynced ones is there.

    Two seeds draw nothing: 0, all of it is there; 1, nothing is.
    """

    events: int
    seed: int


def crashes(events: int, count: int) -> Iterator[Crash]:
    """So many, spread over all moments: with everything there first, then with nothing, then drawn."""
    for number in range(count):
        cut, seed = number % (events + 1), number // (events + 1)
        if count <= events:  # not even one each
            cut, seed = number * events // max(1, count - 1), number % 4
        yield Crash(cut, seed)


def after(crash: Crash, saved: Saved, events: list[Event]) -> tuple[Saved, list[str]]:
    """What is there after power was lost, and what was acknowledged before."""
    happened, draw = events[: crash.events], random.Random(f"{crash}")
    synced: dict[int, int] = {}
    for index, event in enumerate(happened):
        if event.kind in ("sync", "sync folder"):
            synced[event.inode] = index
    modes = {number: mode for number, (mode, _) in saved.items()}
    modes |= {event.inode: event.size for event in happened if event.kind == "new"}
    tree: Saved = {
        number: (mode, {} if stat.S_ISDIR(mode) else bytearray()) for number, mode in modes.items()
    }
    for number, (_, content) in saved.items():
        tree[number] = (modes[number], dict(content) if isinstance(content, dict) else bytearray(content))
    marks = []
    for index, event in enumerate(happened):
        whose = {folder for folder, _, _ in event.names} or {event.inode}
        is_durable = all(synced.get(each, -1) > index for each in whose)
        if event.kind == "mark":
            marks.append(event.data.decode())
        elif event.kind not in ("name", "write", "size", "hole") or not (
            is_durable or _is_there(crash, draw)
        ):
            continue
        elif event.kind == "name":
            for folder, name, inode in event.names:
                tree[folder][1].pop(name, None)
                if inode is not None:
                    tree[folder][1][name] = inode
        else:
            _apply(event, tree[event.inode][1], None if is_durable or crash.seed == 0 else draw)
    return tree, marks


def _is_there(crash: Crash, draw: random.Random) -> bool:
    if crash.seed < 2:
        return crash.seed == 0
    return draw.random() < (crash.seed % 5 + 1) / 6


def _apply(event: Event, content: bytearray, torn: random.Random | None) -> None:
    if event.kind == "size":
        del content[event.size :]
        content.extend(bytes(event.size - len(content)))
        return
    data, begin = event.data or bytes(event.size), event.offset
    pieces = [(0, len(data))]
    if torn is not None and torn.random() < 0.5:
        bounds = [0, *range(-begin % SECTOR_BYTES or SECTOR_BYTES, len(data), SECTOR_BYTES), len(data)]
        pieces = [pair for pair in itertools.pairwise(bounds) if torn.random() < 0.6]
    for first, last in pieces:
        content.extend(bytes(max(0, begin + last - len(content))))
        content[begin + first : begin + last] = data[first:last]


def build(tree: Saved, folder: Path, number: int = ROOT) -> None:
    """Make the folder, and all that is in it."""
    folder.mkdir()
    for name, inode in tree[number][1].items():
        path, (mode, content) = folder / os.fsdecode(name), tree[inode]
        if isinstance(content, dict):
            build(tree, path, inode)
        else:
            path.write_bytes(content)
            path.chmod(stat.S_IMODE(mode))


class Scenario(NamedTuple):
    """What is recorded, and what must be found after a crash.

    prepare    makes what is there, durable, before
    act        is recorded. Calls its second argument with what it has been told is durable
    problems   of what is found in a folder where power was lost, after this was acknowledged
    """

    prepare: Callable[[Path], None]
    act: Callable[[Path, Mark], None]
    problems: Callable[[Path, list[str]], Iterable[str]]


def marking(folder: Path) -> Mark:
    return lambda text: (folder / f"{MARK}{text}").exists() and None


def _save_often(io: str | None) -> Scenario:
    options = None if io is None else IoOptions(paths=[io])

    def prepare(folder: Path) -> None:
        checkpoint.save(state_of(0), folder / "state")

    def act(folder: Path, mark: Mark) -> None:
        for step in (1, 2, 3):
            if handle := checkpoint.save(state_of(step), folder / "state", wait=step != 2, io=options):
                handle.wait()
            mark(f"{step}")

    def problems(folder: Path, marks: list[str]) -> Iterable[str]:
        least = max(map(int, marks), default=0)
        found = checkpoint.load(folder / "state", mmap=False)
        step = found["step"]
        checkpoint.verify(folder / "state")
        if not least <= step <= least + 1:
            yield f"step {step} is there, and {least} was acknowledged"
        if not same(found, state_of(step)):
            yield f"step {step} has other bits"
        checkpoint.save(state_of(9), folder / "state")
        if os.listdir(folder) != ["state"]:
            yield f"the next save leaves {os.listdir(folder)}"

    return Scenario(prepare, act, problems)


def _save_new() -> Scenario:
    """Where nothing was."""

    def act(folder: Path, mark: Mark) -> None:
        for name in ("one", "two"):
            checkpoint.save(state_of(len(name)), folder / name)
            mark(name)

    def problems(folder: Path, marks: list[str]) -> Iterable[str]:
        for name in ("one", "two"):
            if (folder / name).exists():
                if not same(checkpoint.load(folder / name), state_of(len(name))):
                    yield f"{name} has other bits"
            elif name in marks:
                yield f"{name} was acknowledged, and is not there"

    return Scenario(lambda folder: None, act, problems)


def _manager() -> Scenario:
    def act(folder: Path, mark: Mark) -> None:
        with checkpoint.Manager(folder / "run", keep_last=2, keep_every=4) as manager:
            for step in range(1, 8):
                manager.save(_run_state(step), step, wait=step % 2 == 0).wait()
                mark(f"{step}")

    def problems(folder: Path, marks: list[str]) -> Iterable[str]:
        least = max(map(int, marks), default=0)
        with checkpoint.Manager(folder / "run", keep_last=2, keep_every=4) as manager:
            steps = manager.steps()
            if (steps[-1] if steps else 0) not in (least, least + 1):
                yield f"steps {steps} are there, and {least} was acknowledged"
            yield from _bits_of(folder, steps)
            manager.save(_run_state(9), 9, wait=True)
            yield from _bits_of(folder, manager.steps())
        left = [name for name in os.listdir(folder / "run") if name.endswith(".penstock")]
        if left:
            yield f"{left} was left"

    return Scenario(lambda folder: None, act, problems)


def _run_state(step: int) -> dict[str, Any]:
    return {**state_of(step), "seldom": state_of(step // 3)["weights"]}


def _bits_of(folder: Path, steps: Iterable[int]) -> Iterable[str]:
    for step in steps:
        path = folder / "run" / f"step-{step:010}.safetensors"
        if not same(checkpoint.load(path), _run_state(step)):
            yield f"step {step} has other bits"


def _pack(before: list[tuple[str, bytes]] | None) -> Scenario:
    overwrite = before is not None

    def prepare(folder: Path) -> None:
        if before is not None:
            activities.packing(before)(folder)

    def act(folder: Path, mark: Mark) -> None:
        activities.packing(SAMPLES, overwrite=overwrite)(folder)
        mark("packed")

    def problems(folder: Path, marks: list[str]) -> Iterable[str]:
        is_store = (folder / "store" / "store.json").exists()
        if not is_store and (marks or before is not None):
            yield "there is no store"
        is_whole = is_store and not (folder / "store" / "packing.json").exists()
        if is_whole:
            samples.verify(folder / "store")
            if not activities.holds(folder, SAMPLES) and not (
                before and not marks and activities.holds(folder, before)
            ):
                yield "the store has other samples"
        activities.packing(SAMPLES, overwrite=overwrite)(folder)
        if not activities.holds(folder, SAMPLES):
            yield "packed again it has other samples"
        if os.listdir(folder) != ["store"]:
            yield f"packing again leaves {os.listdir(folder)}"

    return Scenario(prepare, act, problems)


def _namespace() -> Scenario:
    """A store that is uploaded to a remote drive, then another one in its place: the drive is a file."""
    size_bytes = 12 << 20
    before = {
        "": {"", "store"},
        "uploaded": {"store"},
        "replacing": {"", "store", "other"},
        "replaced": {"other"},
    }

    def prepare(folder: Path) -> None:
        for name, content in (("store", SAMPLES), ("other", OTHERS)):
            write_store(folder / name, content)
        with (folder / "namespace").open("wb") as file:
            file.truncate(size_bytes)

    def act(folder: Path, mark: Mark) -> None:
        namespace = Namespace(1, size_bytes, file=folder / "namespace")
        with Target([Subsystem(NQN.format(0), [namespace])]) as target:
            url = f"nvme+tcp://{target.address}:{target.port}/{NQN.format(0)}?ns=1"
            samples.upload(folder / "store", url)
            mark("uploaded")
            mark("replacing")
            samples.upload(folder / "other", url, overwrite=True)
            mark("replaced")

    def found(device: MemoryDevice, folder: Path) -> str:
        """The name of the store that is there; empty: none is."""
        try:
            _, _, partitions = read_store(device, "there")
        except SampleError:
            return ""
        stored = {
            file.name: read_bytes(device, file.offset, file.size_bytes).tobytes()
            for files in partitions.values()
            for file in files.values()
        }
        for name in ("store", "other"):
            if stored == {each: path.read_bytes() for each, path in local_store(folder / name).paths.items()}:
                return name
        return "other bytes"

    def problems(folder: Path, marks: list[str]) -> Iterable[str]:
        lease._OTHERS_S = 0.0  # nobody else writes
        device = MemoryDevice(size_bytes, content=(folder / "namespace").read_bytes())
        if (there := found(device, folder)) not in before[marks[-1] if marks else ""]:
            yield f"{there or 'nothing'} is there, after {marks}"
        upload_to(device, "there", local_store(folder / "other"), overwrite=True)
        if (there := found(device, folder)) != "other":
            yield f"uploaded again, {there or 'nothing'} is there"

    return Scenario(prepare, act, problems)


def _cache() -> Scenario:
    def read(folder: Path) -> str:
        return activities.read_all(os.environ["PENSTOCK_FAULTS_URL"], cache_dir=folder / "cache")

    def act(folder: Path, mark: Mark) -> None:
        read(folder)
        mark("read")

    def problems(folder: Path, marks: list[str]) -> Iterable[str]:
        for when in ("", " again"):
            if read(folder) != _right_digest():
                yield f"other samples are read{when}"

    return Scenario(lambda folder: None, act, problems)


_digests: list[str] = []


def _right_digest() -> str:
    if not _digests:
        _digests.append(activities.read_all(os.environ["PENSTOCK_FAULTS_URL"]))
    return _digests[0]


def _values() -> Scenario:
    def prepare(folder: Path) -> None:
        _renamed(0).save(folder / "hardware.json")

    def act(folder: Path, mark: Mark) -> None:
        for number in (1, 2, 3):
            _renamed(number).save(folder / "hardware.json")
            mark(f"{number}")

    def problems(folder: Path, marks: list[str]) -> Iterable[str]:
        least, found = max(map(int, marks), default=0), Hardware.load(folder / "hardware.json")
        if found not in (_renamed(least), _renamed(least + 1)):
            yield f"{found.name} is there, and {least} was acknowledged"

    return Scenario(prepare, act, problems)


def _renamed(number: int) -> Hardware:
    return replace(HARDWARE, name=f"{number}")


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "save over another": lambda: _save_often(None),
    "save over another, buffered": lambda: _save_often("posix buffered"),
    "save": _save_new,
    "Manager, increments": _manager,
    "samples pack": lambda: _pack(None),
    "samples pack, overwrite": lambda: _pack(OTHERS),
    "samples upload, namespace": _namespace,
    "samples cache": _cache,
    "values": _values,
}
