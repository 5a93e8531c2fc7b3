"""One process for each row, so that no row pays for another's threads and memory."""

from __future__ import annotations

import gc
import multiprocessing
import resource
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from samples_bench.data import Data, drop, id_of, warm


def make(row: str) -> Any:
    """The reader of a row. Imported here, in the row's own process."""
    if row.startswith("penstock"):
        from samples_bench import own

        return {
            "penstock chunk, bread(256)": lambda: own.Bread("chunk", 256),
            "penstock chunk, bread(64)": lambda: own.Bread("chunk", 64),
            "penstock chunk, bread(64), one core": lambda: own.Bread("chunk", 64, one_core=True, io="direct"),
            "penstock full, bread(64)": lambda: own.Bread("full", 64),
            "penstock Loader, batches of 64": lambda: own.Loaded("chunk", 64),
        }[row]()
    from samples_bench import peers

    return {
        "one file per sample": peers.Files,
        "packed file, pread": peers.Packed,
        "packed file, mapped": peers.PackedMemory,
        "LMDB": peers.Lmdb,
        "WebDataset": peers.WebDataset,
        "MosaicML streaming": peers.Streaming,
        "litdata": peers.LitData,
        "grain, array_record": peers.Grain,
        "Hugging Face datasets": peers.HuggingFace,
    }[row]()


class Row:
    """A row's process. Commands are a method of `_Served` and its arguments.

    Raises RuntimeError with the row's own traceback where a command fails, TimeoutError where it takes longer
    than ``timeout_s``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(name, other), daemon=False)
        self._process.start()
        other.close()

    def ask(self, command: str, *arguments: Any, timeout_s: float = 600) -> Any:
        self._pipe.send((command, arguments))
        if not self._pipe.poll(timeout_s):
            self._process.kill()
            raise TimeoutError(f"{self.name}: {command} took longer than {timeout_s} s")
        try:
            worked, answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.name}: its process ended") from None
        if not worked:
            raise RuntimeError(f"{self.name}: {answer}")
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(name: str, pipe: Connection) -> None:
    served = _Served(name)
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(served, command)(*arguments)))
        except BaseException as error:  # whatever a library raises
            pipe.send((False, "".join(traceback.format_exception_only(error)).strip()[:500]))


class _Served:
    def __init__(self, name: str) -> None:
        self.name = name
        self.reader: Any = None

    def write(self, folder: Path, data: Data) -> float:
        begun_s = time.perf_counter()
        make(self.name).write(folder, data)
        return time.perf_counter() - begun_s

    def open(self, folder: Path, data: Data) -> None:
        self.folder, self.data = folder, data
        self.reader = make(self.name)
        self.reader.open(folder, data)

    def reopen_cold(self) -> None:
        """What is mapped cannot be dropped."""
        if hasattr(self.reader, "close"):
            self.reader.close()
        self.reader = None
        gc.collect()
        drop(self.folder)
        self.open(self.folder, self.data)

    def run(self, seed: int, cold: bool, most_s: float) -> dict[str, float]:
        """Read for a time, or one epoch: seconds of wall and processor, samples."""
        if cold:
            self.reopen_cold()
        else:
            warm(self.folder)
        usage, begun_s = _cpu_s(), time.perf_counter()
        end_s, count = begun_s + most_s, 0
        if hasattr(self.reader, "batches"):
            counted = self.reader.count
            for batch in self.reader.batches(seed):
                count += counted(batch)
                if time.perf_counter() > end_s:
                    break
        else:
            for _ in self.reader.epoch(seed):
                count += 1
                if not count & 15 and time.perf_counter() > end_s:
                    break
        return {"wall_s": time.perf_counter() - begun_s, "cpu_s": _cpu_s() - usage, "samples": count}

    def order(self, seed: int, samples: int) -> list[int]:
        """The numbers of the first samples of an epoch, from their bytes. Not timed."""
        found: list[int] = []
        if hasattr(self.reader, "batches"):
            for batch in self.reader.batches(seed):
                found += [id_of(sample) for sample in self.reader.samples(batch)]
                if len(found) >= samples:
                    break
            return found[:samples]
        for sample in self.reader.epoch(seed):
            found.append(id_of(sample))
            if len(found) >= samples:
                break
        return found


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
