"""Mistakes in what keeps copies and kernels apart on an accelerator: each wait, pin and guard taken out.

    python -m tests.device.mutants NAME

tries in many orders, with the mistake NAME, the program that it shows in. It ends with 1, and says how, where
one goes wrong.

Not here is what no bits depend on: what measures time; what keeps the host near the device (`limit_lead`);
what has memory in one piece (`Compaction._hold` and `_clearing`); pins by which nothing leaves that would
have to come back at once, so that the engine, the clock and `take_over` get on. Nor the arena's, which
tests/model takes out.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.abc
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "src" / "penstock" / "runtime"
BUILD = ROOT / "build" / "mutants"
ACCELERATOR, COPIES, DIRECT = "devices/accelerator", "devices/copies", "devices/direct"
PACKING, QUEUES, STAGING = "devices/packing", "devices/queues", "devices/staging"
ENGINE, METHODS, RECOMPUTE = "copy_engine", "storage_methods", "recompute"
DISPATCH, PLACES = "csrc/runtime/dispatch.cpp", "csrc/runtime/device_segment.cpp"
ADDRESSES = "tests/device/test_addresses_of_what_is_away.py"
WHOLE = "tests/device/test_what_is_away_is_whole.py"
SEGMENT = "tests/device/test_large_tensors_share_one_segment.py"


@dataclass(frozen=True)
class Mutant:
    """``old`` becomes ``new``, in a file of penstock.runtime, or of csrc.

    shown   by a test, or by the program of tests.device.probes that has this name
    also    (old, new) of what belongs to it
    error   that is raised, where no other numbers come of it
    fast    it is seen in seconds
    """

    name: str
    file: str
    old: str
    new: str
    shown: str = ""
    also: tuple[tuple[str, str], ...] = ()
    error: str = ""
    fast: bool = False

    @property
    def is_native(self) -> bool:
        return self.file.endswith(".cpp")

    @property
    def path(self) -> Path:
        return ROOT / self.file if self.is_native else RUNTIME / f"{self.file}.py"

    def source(self) -> str:
        """Raises ValueError where the file has not ``old`` once."""
        source = self.path.read_text()
        for old, new in ((self.old, self.new), *self.also):
            if source.count(old) != 1:
                raise ValueError(f"{self.file} has {source.count(old)} times, not once:\n{old}")
            source = source.replace(old, new)
        return source


MUTANTS = [
    # Kernels, and copies out of what they make.
    Mutant(
        "a copy leaves before kernels have made it",
        ACCELERATOR,
        "            copy.ready = [self._events.record(stream) for stream in self.streams]\n            slot",
        "            copy.ready = []\n            slot",
    ),
    Mutant(
        "copies are issued before what they wait for",
        QUEUES,
        "                    self._stream.wait_event(event)\n",
        "                    pass\n",
    ),
    Mutant(
        "the direct path does not wait for kernels",
        DIRECT,
        "            copy.wait()  # no stream carries it out that could wait\n",
        "",
        "directly",
    ),
    Mutant(
        "what is packed is not made yet",
        ACCELERATOR,
        "copy.ready = [self._events.record(stream) for stream in self.streams]\n        self._packing",
        "copy.ready = []\n        self._packing",
    ),
    Mutant(
        "packing waits for nothing",
        PACKING,
        "        copy.wait()\n",
        "",
    ),
    Mutant(
        "packed bytes are written before they are packed",
        PACKING,
        "(content, *codec, admits, stream)\n            self._events.complete(stream)\n",
        "(content, *codec, admits, stream)\n",
    ),
    # Copies in, and kernels that use what they bring.
    Mutant(
        "a copy lands in memory that is still used",
        ACCELERATOR,
        "        copy.ready = [self._events.record(managed.owner_stream)]\n",
        "        copy.ready = []\n",
    ),
    Mutant(
        "what is made again lands in memory that another stream still uses",
        ACCELERATOR,
        "            self._events.order(managed.owner_stream, current)\n",
        "            pass\n",
        "made_again",
    ),
    Mutant(
        "kernels do not wait for a copy that they join",
        COPIES,
        "                stream.wait_event(event)\n        return True\n",
        "                pass\n        return True\n",
    ),
    Mutant(
        "kernels of one stream wait for a copy that they join",
        COPIES,
        "for stream in {*self.streams, managed.owner_stream}:",
        "for stream in {managed.owner_stream}:",
    ),
    Mutant(
        "a stream that is met later does not wait for what was joined",
        COPIES,
        "            for event in self._waited_on:\n                stream.wait_event(event)\n",
        "",
    ),
    Mutant(
        "what was joined is forgotten at once",
        COPIES,
        "            self._waited_on.add(event)\n",
        "",
    ),
    Mutant(
        "a stream is not met by accesses without an operator",
        METHODS,
        "                self._device.begin_kernel()\n",
        "",
        "accessed",
    ),
    Mutant(
        "a stream is not met by what resizes a storage",
        ACCELERATOR,
        "        self.begin_kernel()\n        return self._driver.resize",
        "        return self._driver.resize",
        "resized",
    ),
    Mutant(
        "with a copy that kernels wait for, others are taken for over",
        ENGINE,
        "            if other.managed.state == state and self._device.make_kernels_wait(other):\n",
        "            if other.managed.state == state:\n",
        error="out of memory",  # now and then
    ),
    Mutant(
        "the host takes a copy for complete when it is issued",
        QUEUES,
        "                copy.over.synchronize()\n",
        "                return True\n",
    ),
    Mutant(
        "the host takes a copy for complete when it polls",
        QUEUES,
        "            elif not copy.over.query():\n                return False\n",
        "            elif not copy.over.query():\n                return True\n",
    ),
    Mutant(
        "an expanded tensor is used before it is expanded",
        PACKING,
        "        self._events.complete(stream)\n        if not whole:\n",
        "        if not whole:\n",
    ),
    Mutant(
        "what moves before its copy begins is moved behind it",
        QUEUES,
        "                copy.ready.append(event)\n",
        "                pass\n",
    ),
    Mutant(
        "what moves when its copy was issued is moved meanwhile",
        QUEUES,
        "            event = make_event() if copy.waits else None\n",
        "            event = make_event()\n",
        "moved_while_it_waits",
        also=(("copy.waits = copy.managed.copy_pending = False", "copy.waits = False"),),
    ),
    Mutant(
        "what comes from the disk is moved when its copy has begun",
        QUEUES,
        "            self._begin(entry[-1])\n",
        "",
        f"{SEGMENT}::test_what_waits_to_come_from_the_disk_moves",
        fast=True,
    ),
    Mutant(
        "what the run gives back is used before it is there",
        ACCELERATOR,
        "                if (error := over.get().error) is not None:\n",
        "                if (error := None) is not None:\n",
        "given_back",
        fast=True,
    ),
    Mutant(
        "who takes an address does not wait for the bytes",
        METHODS,
        "        self._device.synchronize()  # for what comes: who uses the address may be no kernel\n",
        "        pass\n",
        f"{ADDRESSES}::test_who_uses_it_need_not_wait",
    ),
    # Memory that changes hands.
    Mutant(
        "memory is given away while another stream uses it",
        ACCELERATOR,
        "                self._events.order(stream, managed.owner_stream)\n",
        "                pass\n",
    ),
    Mutant(
        "memory of what was there before is given away while it is used",
        ACCELERATOR,
        "if found:\n                self._driver.record_stream(storage, stream)\n",
        "if found:\n                pass\n",
    ),
    Mutant(
        "what the program recorded of a stream is forgotten with the memory",
        ACCELERATOR,
        "            self._driver.record_stream(storage, stream)\n        self.memory.managed_bytes +=",
        "            pass\n        self.memory.managed_bytes +=",
    ),
    Mutant(
        "what the program recorded of a stream moves",
        ACCELERATOR,
        "managed.reports_freed = managed.fixed_in_segment = True",
        "managed.reports_freed = True",
        f"{SEGMENT}::test_what_others_use_does_not_move",
    ),
    Mutant(
        "memory is freed while it is copied",
        ENGINE,
        "        while managed.kept_alive is not None:\n            self._wait()\n",
        "",
        "resized",
        error="BudgetTooSmall",
    ),
    Mutant(
        "a block of the host is used again while it is copied",
        COPIES,
        "                if not slot.copies:\n                    self.slab.release(slot.block)\n",
        "                self.slab.release(slot.block)\n                slot.is_freed = False\n",
        f"{WHOLE}::test_a_block_of_the_host_is_free_when_its_copies_are_over",
    ),
    Mutant(
        "a block of the host is used again when one of its copies is over",
        COPIES,
        "        if slot.is_freed and not slot.copies:\n            self.slab.release(slot.block)\n",
        """        if slot.is_freed:
            self.slab.release(slot.block)
            slot.is_freed = False
""",
        f"{WHOLE}::test_a_block_of_the_host_is_free_when_its_copies_are_over",
    ),
    Mutant(
        "chunks do not wait for a buffer",
        STAGING,
        "            buffer, self._next_buffer = self._next_buffer, None\n",
        "            buffer = self._next_buffer\n",
        "from_disk",
    ),
    Mutant(
        "events that a copy waits for are used again before it is issued",
        COPIES,
        "        self._events.free.extend(copy.ready)\n        copy.on_end(copy)\n",
        "        copy.on_end(copy)\n",
        "in_turns",
        also=(
            (
                "slot.block, self._on_copy_end\n",
                "slot.block, self._on_copy_end\n        self._events.free.extend(copy.ready)\n",
            ),
        ),
        fast=True,
    ),
    # Pins.
    Mutant(
        "what a kernel uses is released",
        ENGINE,
        """        if managed.pins:
            self.unpinned_later.append(managed)
            return
""",
        "",
        "ended_at_a_launch",
        error="illegal memory access",
    ),
    Mutant(
        "what a kernel uses is released when it is packed",
        ENGINE,
        "managed.freeing_bytes and not managed.copy_invalid and not managed.pins\n",
        "managed.freeing_bytes and not managed.copy_invalid\n",
        "ended_at_a_launch",
        error="illegal memory access",
    ),
    Mutant(
        "what a kernel uses is copied while it is written",
        ENGINE,
        "        if storage is None or managed.pins:  #",
        "        if storage is None:  #",
        "ended_at_a_launch",
        fast=True,
    ),
    Mutant(
        "what a kernel uses is dropped",
        RECOMPUTE,
        " or managed.writing_packed or managed.pins:\n",
        " or managed.writing_packed:\n",
        "accessed",
    ),
    Mutant(
        "what is accessed without an operator leaves meanwhile",
        METHODS,
        """                yield
            finally:
                self._launching.there = before
                with self._engine.lock:
                    for managed in used:
                        managed.pins += stays
""",
        """                self._unpin(used)
                yield
            finally:
                self._launching.there = before
                with self._engine.lock:
                    for managed in used:
                        managed.pins += 1 + stays
""",
        "accessed",
    ),
    Mutant(
        "what other processes have leaves",
        METHODS,
        "                    for managed in used:\n                        managed.pins += stays\n",
        "",
        "accessed",
    ),
    Mutant(
        "what has an address leaves",
        METHODS,
        "            self._addressed |= dict.fromkeys(used)\n",
        "            self._unpin(used)\n",
        f"{ADDRESSES}::test_several_stay_together_until_a_step_begins",
    ),
    Mutant(
        "what others have leaves",
        METHODS,
        "            given.extend(used)\n            self._lent.extend(used)\n",
        "            self._unpin(used)\n",
        f"{ADDRESSES}::test_another_library_has_the_memory_for_as_long_as_it_likes[__dlpack__]",
    ),
    Mutant(
        "what is resized leaves meanwhile",
        METHODS,
        """                for part in parts:
                    part.pins += 1
            try:
                with self._interrupts, self._engine.lock:
                    for part in parts:
                        self._recomputation.will_write(part)
""",
        """            try:
                with self._interrupts, self._engine.lock:
                    for part in parts:
                        self._recomputation.will_write(part)
""",
        "resized",
        also=(
            (
                """            finally:
                for part in parts:
                    part.pins -= 1
            with""",
                """            finally:
                pass
            with""",
            ),
        ),
    ),
    Mutant(
        "what runs again reads what leaves meanwhile",
        RECOMPUTE,
        "        used = [managed, *recipe.reads]\n",
        "        used = [managed]\n",
        "made_again",
        error="BudgetTooSmall",
    ),
    Mutant(
        "what a collective uses leaves meanwhile",
        "collectives",
        "            managed.pins += 1\n",
        "            pass\n",
        "tests/runtime/test_collectives_hold_what_they_use.py::test_work_that_never_tells_is_not_asked",
        also=(("                    managed.pins -= 1\n", ""),),
    ),
    # The native part.
    Mutant(
        "kernels pin nothing",
        DISPATCH,
        "      ++managed->pins;\n      managed->in_kernel = true;\n",
        "      managed->in_kernel = true;\n",
        "ended_at_a_launch",
        also=(("      --managed->pins;\n      managed->in_kernel", "      managed->in_kernel"),),
        error="illegal memory access",
    ),
    Mutant(
        "views pin nothing",
        DISPATCH,
        "    for (auto* managed : used.storages) ++managed->pins;\n    try {\n      if (std",
        "    try {\n      if (std",
        "ended_at_a_launch",
        also=(
            (
                "      for (auto* managed : used.storages) --managed->pins;\n      kernel_over",
                "      kernel_over",
            ),
            (
                "    for (auto* managed : used.storages) --managed->pins;\n    if (is_empty",
                "    if (is_empty",
            ),
        ),
        error="out of bounds for storage of size 0",
    ),
    Mutant(
        "what is pinned moves within the segment",
        PLACES,
        " || managed->fixed_in_segment || managed->pins > 0) return kNever;",
        " || managed->fixed_in_segment) return kNever;",
        f"{SEGMENT}::test_what_others_use_does_not_move",
    ),
    Mutant(
        "what others use moves within the segment",
        PLACES,
        " || managed->fixed_in_segment || managed->pins > 0) return kNever;",
        " || managed->pins > 0) return kNever;",
        f"{SEGMENT}::test_what_others_use_does_not_move",
    ),
    Mutant(
        "what moves while it is copied",
        "devices/compaction",
        "        elif managed.state != RESIDENT or not self._resize(managed, storage):\n",
        "        elif not self._resize(managed, storage):\n",
        "moved_while_it_waits",
    ),
]


class _Changed(importlib.abc.SourceLoader):
    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def get_filename(self, fullname: str) -> str:
        return str(self.mutant.path)

    def get_data(self, path: str | bytes) -> bytes:  # type: ignore[override]
        return self.mutant.source().encode()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, loader: Any) -> None:
        self.name, self.loader = name, loader

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self.loader) if fullname == self.name else None


def cmake() -> str | None:
    """The system's, or that of the environment."""
    return shutil.which("cmake", path=f"{os.environ['PATH']}{os.pathsep}{Path(sys.executable).parent}")


def built(mutant: Mutant, folder: Path) -> Path:
    """The native module with the mistake, in the folder. The first takes minutes: all is compiled."""
    sources = BUILD / "sources"
    sources.mkdir(parents=True, exist_ok=True)
    nanobind = subprocess.check_output([sys.executable, "-m", "nanobind", "--cmake_dir"], text=True).strip()
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "PENSTOCK_PRECOMPILE": "ON",
        "Python_EXECUTABLE": sys.executable,
        "nanobind_DIR": nanobind,
    }
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in (ROOT / "CMakeLists.txt", *(ROOT / "csrc").rglob("*.?pp")):
            content = mutant.source() if path == mutant.path else path.read_text()
            copied = sources / path.relative_to(ROOT)
            if not copied.exists() or copied.read_text() != content:
                copied.parent.mkdir(parents=True, exist_ok=True)
                copied.write_text(content)
        for command in (
            ["-S", sources, "-B", BUILD, *(f"-D{name}={value}" for name, value in settings.items())],
            ["--build", BUILD, "--target", "_native", "--parallel", "2"],
        ):
            done = subprocess.run([cmake() or "cmake", *command], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stdout + done.stderr)
        (module,) = BUILD.glob("_native*.so")
        return Path(shutil.copy2(module, folder))


def attempts(shown: str) -> Iterator[str]:
    """What went wrong, of each attempt; "": nothing."""
    from tests.support import accelerator

    emu = accelerator.load("emu")
    from tests.device import probes

    for order, seed, probe in probes.ATTEMPTS:
        if shown not in ("", probe.__name__):
            continue
        emu.configure(order=order, seed=seed, host_delay_us=50)
        with tempfile.TemporaryDirectory() as folder:
            try:
                right = probe(Path(folder))
            except Exception as error:
                yield f"{probe.__name__}, {order}, {seed}: {type(error).__name__}: {error}"
            else:
                yield "" if right else f"{probe.__name__}, {order}, {seed}: other numbers"


def main(name: str) -> int:
    shown = ""
    with contextlib.ExitStack() as kept:
        if name:
            mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
            shown = mutant.shown
            module, loader = "penstock.runtime." + mutant.file.replace("/", "."), _Changed(mutant)
            if mutant.is_native:
                module = "penstock._native"
                path = built(mutant, Path(kept.enter_context(tempfile.TemporaryDirectory())))
                loader = importlib.machinery.ExtensionFileLoader(module, str(path))
            sys.meta_path.insert(0, _Finder(module, loader))
        if "/" in shown:
            return int(pytest.main(["-q", "-p", "no:cacheprovider", "-o", "addopts=", shown]) == 1)
        for number, wrong in enumerate(attempts(shown)):
            if wrong:
                print(f"attempt {number}: {wrong}")
                return 1
        print(f"nothing went wrong in {number + 1} attempts")
        return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or [""]))
