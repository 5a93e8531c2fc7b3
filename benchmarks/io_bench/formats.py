"""What saves a dict of tensors to a path and loads it: penstock, torch, numpy, safetensors, others.

Those that have to be installed first: pip install safetensors torchsnapshot.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from io_bench.measure import sync
from penstock import checkpoint

State = dict[str, Tensor]


class Unavailable(Exception):
    """This cannot run here; says why."""


class Format(ABC):
    """One library, used one way. Raises Unavailable where it is not installed.

    does             what it does that others do not, or the reverse
    suffix           of its files
    maps             it gives memory that is read from the disk when it is touched
    always_durable   it syncs even where nobody asks
    one_tensor       it takes dicts of one tensor only
    loads_only       it saves as another one does: only its loading is measured
    """

    name: str
    does: str
    suffix: str = ""
    maps: bool = False
    always_durable: bool = False
    one_tensor: bool = False
    loads_only: bool = False

    @abstractmethod
    def save(self, state: State, path: Path, durable: bool) -> None:
        """Write ``state`` to ``path``, where nothing is; ``durable``: it is on the disk to stay."""

    @abstractmethod
    def load(self, path: Path, into: State) -> State:
        """What was saved; in the memory of ``into`` if that is how the library reads."""


class Penstock(Format):
    name = "penstock"
    does = "penstock.save checksums, syncs file and directory, and renames, always; penstock.load verifies"
    suffix = ".safetensors"
    always_durable = True

    def save(self, state: State, path: Path, durable: bool) -> None:
        checkpoint.save(state, path)

    def load(self, path: Path, into: State) -> State:
        return checkpoint.load(path)


class PenstockInto(Penstock):
    name = "penstock, into"
    does = "penstock.load(into=...): verifies, reads into memory that is there"
    loads_only = True

    def load(self, path: Path, into: State) -> State:
        return checkpoint.load(path, into=into)


class Torch(Format):
    name = "torch"
    does = "torch.save, torch.load"
    suffix = ".pt"

    def save(self, state: State, path: Path, durable: bool) -> None:
        torch.save(state, path)
        if durable:
            sync(path)

    def load(self, path: Path, into: State) -> State:
        return torch.load(path)


class TorchMapped(Torch):
    name = "torch, mmap"
    does = "torch.load(mmap=True), every page touched"
    maps = True
    loads_only = True

    def load(self, path: Path, into: State) -> State:
        return torch.load(path, mmap=True)


class Numpy(Format):
    name = "numpy"
    does = "numpy.save, numpy.load"
    suffix = ".npy"
    one_tensor = True

    def save(self, state: State, path: Path, durable: bool) -> None:
        (tensor,) = state.values()
        with open(path, "wb") as file:
            self.dump(tensor.numpy(), file)
            if durable:
                file.flush()
                os.fsync(file.fileno())

    def dump(self, array: np.ndarray, file: Any) -> None:
        np.save(file, array)

    def load(self, path: Path, into: State) -> State:
        return {name: torch.from_numpy(np.load(path)) for name in into}


class NumpyRaw(Numpy):
    name = "numpy, raw"
    does = "ndarray.tofile, numpy.fromfile: no header, neither shape nor type"
    suffix = ".raw"

    def dump(self, array: np.ndarray, file: Any) -> None:
        array.tofile(file)

    def load(self, path: Path, into: State) -> State:
        return {name: torch.from_numpy(np.fromfile(path, dtype=np.float32)) for name in into}


class Safetensors(Format):
    name = "safetensors"
    does = "save_file; load_file, which maps the file, every page touched"
    suffix = ".safetensors"
    maps = True

    def __init__(self) -> None:
        require("safetensors")
        from safetensors import torch as library

        self._library = library

    def save(self, state: State, path: Path, durable: bool) -> None:
        self._library.save_file(state, path)
        if durable:
            sync(path)

    def load(self, path: Path, into: State) -> State:
        return self._library.load_file(path)


class Distributed(Format):
    name = "torch DCP"
    does = (
        "torch.distributed.checkpoint in one process, an I/O thread for each core; reads into memory that "
        "is there; durable by its sync_files=True"
    )

    def __init__(self) -> None:
        if not torch.distributed.is_available():
            raise Unavailable("this torch is built without torch.distributed")
        import torch.distributed.checkpoint as library

        self._library = library

    def save(self, state: State, path: Path, durable: bool) -> None:
        threads = len(os.sched_getaffinity(0)) if len(state) > 1 else 1
        with quiet():
            writer = self._library.FileSystemWriter(path, sync_files=durable, thread_count=threads)
            self._library.save(state, storage_writer=writer, no_dist=True)

    def load(self, path: Path, into: State) -> State:
        with quiet():
            reader = self._library.FileSystemReader(path)
            self._library.load(into, storage_reader=reader, no_dist=True)
        return into


class Torchsnapshot(Format):
    name = "torchsnapshot"
    does = "Snapshot.take; restore, which reads into memory that is there"

    def __init__(self) -> None:
        require("torchsnapshot")
        with quiet():
            import torchsnapshot as library
        self._library = library

    def save(self, state: State, path: Path, durable: bool) -> None:
        with quiet():
            self._library.Snapshot.take(str(path), app_state={"state": self._library.StateDict(**state)})
        if durable:
            sync(path)

    def load(self, path: Path, into: State) -> State:
        state = self._library.StateDict(**into)
        with quiet():
            self._library.Snapshot(str(path)).restore(app_state={"state": state})
        return dict(state)


def require(module: str) -> None:
    """Raise Unavailable unless ``module`` can be imported."""
    if importlib.util.find_spec(module) is None:
        raise Unavailable(f"{module} is not installed")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep other libraries' advice from the terminal."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


FORMATS: dict[str, type[Format]] = {
    form.name: form
    for form in (
        Penstock,
        PenstockInto,
        Torch,
        TorchMapped,
        Numpy,
        NumpyRaw,
        Safetensors,
        Distributed,
        Torchsnapshot,
    )
}
