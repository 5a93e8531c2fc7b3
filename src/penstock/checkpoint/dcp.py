"""Checkpoints of several processes: torch.distributed.checkpoint through penstock's files.

::

    dcp.save(state, storage_writer=penstock.checkpoint.dcp.Writer(directory))
    dcp.load(state, storage_reader=penstock.checkpoint.dcp.Reader(directory))

Each rank writes one checkpoint file of its shards into a folder that is new for each save. When all are
durable, rank 0 replaces the file `INDEX`, which says what is where, at once: a job that is killed before
leaves the checkpoint that was there. All of it is read with checksums, and nothing in it is executed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import re
import secrets
import shutil
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from penstock.checkpoint import reading
from penstock.checkpoint.loading import fill_pairs, load
from penstock.checkpoint.matching import Pair
from penstock.checkpoint.saving import save
from penstock.checkpoint.source import CheckpointSource, PathLike, path_of
from penstock.core.files import sync_folder
from penstock.errors import CheckpointError, InvalidArgument, InvalidCheckpoint

INDEX = "index.penstock"
FORMAT = "penstock.dcp"
VERSION = 1

_FOLDER = re.compile(r"save-[0-9a-f]{16}")
_FILE = re.compile(r"rank-\d{1,9}\.safetensors")


class _Directory:
    """Where a checkpoint lies."""

    def __init__(self, directory: PathLike) -> None:
        self.directory = path_of(directory)

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        if checkpoint_id is not None:
            self.directory = path_of(checkpoint_id)

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan


class Writer(_Directory, StorageWriter):
    """For the ``storage_writer`` of torch.distributed.checkpoint's `save` and `async_save`.

    directory   that all ranks see; it is made where it is not there. What is in it stays valid until the
                new checkpoint is complete, and takes room until then. One job at a time writes to it
    """

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=os.fspath(self.directory))  # planners of others may ask for it

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Rank 0 makes a folder, and assigns each rank its file."""
        folder = f"save-{secrets.token_hex(8)}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if (self.directory / INDEX).exists():
                with contextlib.suppress(InvalidCheckpoint):  # it is replaced
                    where = Reader(self.directory).read_metadata().storage_data
                    self._remove_all_but({file.partition("/")[0] for file, _ in where.values()})
            (self.directory / folder).mkdir()
        except OSError as error:
            raise _cannot_write(self.directory, error) from error
        return [
            dataclasses.replace(plan, storage_data=f"{folder}/rank-{rank}.safetensors")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        state: dict[str, torch.Tensor] = {}
        results = []
        for item in plan.items:
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                data = torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8)
            name = _name(item.index)
            tensor = state[name] = data.detach()
            results.append(WriteResult(item.index, tensor.nbytes, (plan.storage_data, name)))
        if state:
            save(state, self.directory / plan.storage_data)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0, when all have written: the new checkpoint takes the old one's place."""
        where = {result.index: result.storage_data for each in results for result in each}
        index = _index_of(metadata, where)
        folders = {file.partition("/")[0] for file, _ in where.values()}
        try:
            for folder in folders:
                sync_folder(self.directory / folder)
            sync_folder(self.directory)
        except OSError as error:
            raise _cannot_write(self.directory, error) from error
        save(index, self.directory / INDEX)
        self._remove_all_but(folders)

    def _remove_all_but(self, kept: Collection[str]) -> None:
        """What earlier saves left, those that were not completed too."""
        for entry in list(os.scandir(self.directory)):
            is_left = _FOLDER.fullmatch(entry.name) and entry.name not in kept
            if is_left and entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return bool(os.fspath(checkpoint_id))


class Reader(_Directory, StorageReader):
    """For the ``storage_reader`` of torch.distributed.checkpoint's `load`.

    directory   that a `Writer` wrote to, by as many ranks as it was

    Raises CheckpointError where it cannot be read, and InvalidCheckpoint where something in it is damaged.
    What torch.distributed.checkpoint pickles, which is all that is no tensor, is loaded only if it is made of
    what torch.load takes with ``weights_only=True``.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self.directory / INDEX
        if not path.exists() and self.directory.is_dir():
            raise CheckpointError(
                f"{self.directory} holds no complete checkpoint of penstock.checkpoint.dcp.Writer: there is "
                f"no {INDEX} in it"
            )
        return _metadata_of(load(path, "cpu"), path)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._where: dict[MetadataIndex, tuple[str, str]] = metadata.storage_data

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[str, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            file, name = self._where[item.storage_index]
            by_file[file].append((name, item))
        for file, items in by_file.items():
            with CheckpointSource(self.directory / file) as source, torch.no_grad():
                _read(source, items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return (Path(checkpoint_id) / INDEX).is_file()


def _read(source: CheckpointSource, items: Sequence[tuple[str, ReadItem]], planner: LoadPlanner) -> None:
    """Give the planner what it wants of one file."""
    entries = reading.read_mapped(source, verify=False)
    saved = reading.state_of(source, entries, restride=False)
    numbers = {entry.untyped_storage().data_ptr(): number for number, entry in enumerate(entries)}
    wanted: set[int] = set()
    pickled: list[tuple[ReadItem, torch.Tensor]] = []
    pairs: list[tuple[ReadItem, Pair]] = []
    for name, item in items:
        tensor = saved.get(name) if isinstance(saved, dict) else None
        if not isinstance(tensor, torch.Tensor):
            raise InvalidCheckpoint(f"{source.path} does not hold {name}, which the index says is there")
        if (number := numbers.get(tensor.untyped_storage().data_ptr())) is not None:
            wanted.add(number)
        if item.type == LoadItemType.BYTE_IO:
            pickled.append((item, tensor))
            continue
        for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, offset, length)
        target = planner.resolve_tensor(item).detach()
        if target.shape != tensor.shape:
            raise InvalidArgument(
                f"{item.dest_index.fqn} has the shape {tuple(target.shape)}, and {tuple(tensor.shape)} in "
                f"{source.path}"
            )
        pairs.append((item, Pair(item.dest_index.fqn, target, tensor)))
    fill_pairs(source, [pair for _, pair in pairs], entries, source.is_cached, wanted=wanted)
    for item, pair in pairs:
        planner.commit_tensor(item, pair.target)
    for item, tensor in pickled:
        planner.load_bytes(item, _checked_pickle(source, item, tensor))


def _checked_pickle(source: CheckpointSource, item: ReadItem, tensor: torch.Tensor) -> io.BytesIO:
    """What torch.distributed.checkpoint has pickled, if loading it executes nothing."""
    data = tensor.numpy().tobytes()
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise InvalidCheckpoint(
            f"{item.storage_index.fqn} in {source.path} is a pickle of more than tensors, numbers, texts and "
            f"containers, which could execute code: {error}. Allow its classes with "
            "torch.serialization.add_safe_globals, or keep them out of the state"
        ) from error
    return io.BytesIO(data)


def _cannot_write(directory: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {directory} cannot be written: {error.strerror}. Give a directory that every rank can "
        "write to."
    )


def _name(index: MetadataIndex) -> str:
    """Of a shard in its file."""
    return index.fqn if index.offset is None else f"{index.fqn}@{','.join(map(str, index.offset))}"


# -- the index ---------------------------------------------------------------------------------


def _index_of(metadata: Metadata, where: dict[MetadataIndex, tuple[str, str]]) -> dict[str, Any]:
    """What `INDEX` holds: plain values, which penstock.save can write."""
    state: dict[str, Any] = {}
    for fqn, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            state[fqn] = list(where[MetadataIndex(fqn)])
            continue
        chunks = [
            [list(chunk.offsets), list(chunk.sizes), *where[MetadataIndex(fqn, chunk.offsets)]]
            for chunk in stored.chunks
        ]
        state[fqn] = {"dtype": stored.properties.dtype, "size": list(stored.size), "chunks": chunks}
    try:
        said = metadata.planner_data
        paths = None if said is None else {fqn: list(path) for fqn, path in said.items()}
    except (AttributeError, TypeError):
        raise InvalidArgument(
            "the index cannot hold what this save planner says of the state: use DefaultSavePlanner"
        ) from None
    return {"format": FORMAT, "version": VERSION, "state": state, "paths": paths}


def _metadata_of(index: Any, path: Path) -> Metadata:
    """Raises InvalidCheckpoint where the index is none."""
    try:
        if index["format"] != FORMAT:
            raise ValueError("it is of another format")
        if index["version"] != VERSION:
            raise ValueError(f"it is of version {index['version']}, which this penstock cannot read")
        where: dict[MetadataIndex, tuple[str, str]] = {}
        state: dict[str, Any] = {}
        for fqn, stored in index["state"].items():
            if isinstance(stored, list):
                where[MetadataIndex(fqn)] = _place(*stored)
                state[fqn] = BytesStorageMetadata()
                continue
            chunks = []
            for number, (offsets, sizes, file, name) in enumerate(stored["chunks"]):
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                where[MetadataIndex(fqn, offsets, number)] = _place(file, name)
            properties = TensorProperties(dtype=stored["dtype"])
            if not isinstance(properties.dtype, torch.dtype):
                raise ValueError(f"{fqn} has no dtype")
            state[fqn] = TensorStorageMetadata(properties, torch.Size(stored["size"]), chunks)
        paths = index["paths"]
        mappings = None if paths is None else {fqn: tuple(each) for fqn, each in paths.items()}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InvalidCheckpoint(
            f"{path} is no index of a checkpoint of penstock.checkpoint.dcp: {error}"
        ) from error
    return Metadata(state, planner_data=mappings, storage_data=where)


def _place(file: Any, name: Any) -> tuple[str, str]:
    """Where a shard is. Raises ValueError for what could be outside of the checkpoint."""
    folder, _, rank = str(file).partition("/")
    if not _FOLDER.fullmatch(folder) or not _FILE.fullmatch(rank) or not isinstance(name, str):
        raise ValueError(f"{file!r} is no file of a checkpoint")
    return f"{folder}/{rank}", name
