"""Mistakes in what keeps copies and kernels apart on an accelerator: each wait, pin and guard taken out.

    python -m tests.device.mutants NAME

tries programs in many orders, with the mistake NAME. It ends with 1, and says how, where one goes wrong.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

RUNTIME = Path(__file__).parents[2] / "src" / "penstock" / "runtime"
ACCELERATOR, QUEUES = "devices/accelerator", "devices/queues"
COPIES, PACKING = "devices/copies", "devices/packing"


@dataclass(frozen=True)
class Mutant:
    """``old`` becomes ``new``, in a file of penstock.runtime."""

    name: str
    file: str
    old: str
    new: str

    def source(self) -> str:
        """Raises ValueError where the file has not ``old`` once."""
        source = (RUNTIME / f"{self.file}.py").read_text()
        if source.count(self.old) != 1:
            raise ValueError(f"{self.file} has {source.count(self.old)} times, not once:\n{self.old}")
        return source.replace(self.old, self.new)


MUTANTS = [
    # Kernels, and copies out of what they make.
    Mutant(
        "a copy leaves before kernels have made it",
        ACCELERATOR,
        "            ready = [self._events.record(stream) for stream in self._streams]\n            slot",
        "            ready = []\n            slot",
    ),
    Mutant(
        "a copy to the host is issued before what it waits for",
        QUEUES,
        "                    self._stream.wait_event(event)\n",
        "                    pass\n",
    ),
    Mutant(
        "what is packed is not made yet",
        ACCELERATOR,
        "        ready = [self._events.record(stream) for stream in self._streams]\n        self._packing",
        "        ready: list[Any] = []\n        self._packing",
    ),
    Mutant(
        "packed bytes are written before they are packed",
        PACKING,
        "(content, *codec, admits, stream)\n            self._events.complete(stream)\n",
        "(content, *codec, admits, stream)\n",
    ),
    Mutant(
        "memory is given away before it is packed, or used before it is expanded",
        COPIES,
        "        event.synchronize()\n",
        "",
    ),
    # Copies in, and kernels that use what they bring.
    Mutant(
        "a copy lands in memory that is still used",
        ACCELERATOR,
        "        ready = [self._events.record(managed.place)]\n",
        "        ready: list[Any] = []\n",
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
        "for stream in {*self.streams, managed.place}:",
        "for stream in {managed.place}:",
    ),
    Mutant(
        "a stream that is met later does not wait for what was joined",
        COPIES,
        "            for event in self._joined:\n                stream.wait_event(event)\n",
        "",
    ),
    Mutant(
        "what was joined is forgotten at once",
        COPIES,
        "            self._joined.add(event)\n",
        "",
    ),
    Mutant(
        "with a copy that kernels wait for, others are taken for over",
        "copy_engine",
        "            if other.state == state and self._device.join(other):\n",
        "            if other.state == state:\n",
    ),
    Mutant(
        "the host takes a copy for complete when it is issued",
        QUEUES,
        "                copy.over.synchronize()\n",
        "                return None, ()\n",
    ),
    Mutant(
        "the host takes a copy for complete when it polls",
        QUEUES,
        "            elif not copy.over.query():\n                return None\n",
        "            elif not copy.over.query():\n                return None, ()\n",
    ),
    Mutant(
        "an expanded tensor is used before it is expanded",
        PACKING,
        "        self._events.complete(stream)\n        if whole:\n",
        "        if whole:\n",
    ),
    Mutant(
        "what moves before its copy begins is moved behind it",
        QUEUES,
        "                copy.ready.append(event)\n",
        "                pass\n",
    ),
    # Memory that changes hands.
    Mutant(
        "memory is given away while another stream uses it",
        COPIES,
        "        then.wait_event(event)\n",
        "",
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
        "            self._driver.record_stream(storage, stream)\n        self.memory.known_bytes +=",
        "            pass\n        self.memory.known_bytes +=",
    ),
]


class _Changed(importlib.abc.SourceLoader):
    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def get_filename(self, fullname: str) -> str:
        return str(RUNTIME / f"{self.mutant.file}.py")

    def get_data(self, path: str | bytes) -> bytes:  # type: ignore[override]
        return self.mutant.source().encode()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.name = "penstock.runtime." + mutant.file.replace("/", ".")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_loader(fullname, _Changed(self.mutant))


def attempts() -> Iterator[str]:
    """What went wrong, of each attempt; "": nothing."""
    from tests.support import accelerator

    emu = accelerator.load("emu")
    from tests.device import probes

    for order, seed, probe in probes.ATTEMPTS:
        emu.configure(order=order, seed=seed, host_delay_us=50)
        with tempfile.TemporaryDirectory() as folder:
            try:
                right = probe(Path(folder))
            except Exception as error:
                yield f"{probe.__name__}, {order}, {seed}: {type(error).__name__}: {error}"
            else:
                yield "" if right else f"{probe.__name__}, {order}, {seed}: other numbers"


def main(name: str) -> int:
    if name:
        mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
        sys.meta_path.insert(0, _Finder(mutant))
    for number, wrong in enumerate(attempts()):
        if wrong:
            print(f"attempt {number}: {wrong}")
            return 1
    print(f"nothing went wrong in {number + 1} attempts")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or [""]))
