"""Which format a source is, and which files its shards are."""

from __future__ import annotations

import glob
import mmap
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import msgspec

from penstock.errors import InvalidArgument, SampleError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

# By the name of a file.
_SUFFIXES = {
    "webdataset": re.compile(r"\.(tar|tar\.gz|tgz)$"),
    "tfrecord": re.compile(r"\.tfrecords?(-\d+-of-\d+)?(\.gz)?$"),
    "arrow": re.compile(r"\.(parquet|pq|arrow|ipc|feather)$"),
    "arrays": re.compile(r"\.(npy|npz)$"),
}
_BESIDE_SHARDS = re.compile(r"^[._]|\.(json|jsonl|md|txt|idx|index)$", re.IGNORECASE)
_BRACES = re.compile(r"\{([^{}]*)\}")
_MOST_SHARDS = 1 << 20


def format_of_path(path: str | os.PathLike[str]) -> str:
    """A key of FORMATS. Raises InvalidArgument where it is none, SampleError where nothing is there."""
    path = os.fspath(path)
    if os.path.isdir(path):
        return _format_of_folder(path)
    if os.path.basename(path) == "index.json":
        return "mds"
    for format_, pattern in _SUFFIXES.items():
        if pattern.search(path):
            return format_
    if not (os.path.exists(path) or _is_wild(path) or _BRACES.search(path)):
        raise SampleError(f"{path} does not exist")
    raise InvalidArgument(
        f"{path} may hold anything: say format=, one of folder, webdataset, tfrecord, arrow, mds, arrays"
    )


def format_of_value(value: Any) -> str:
    """A key of FORMATS for something that is no path."""
    if all(hasattr(value, name) for name in ("with_format", "features", "data", "__len__")):
        return "arrow"
    if _is_array(value):
        return "arrays"
    if isinstance(value, Mapping) and any(hasattr(split, "with_format") for split in value.values()):
        raise InvalidArgument(f"a dataset of several splits: pack one of {', '.join(map(repr, value))}")
    if isinstance(value, Mapping) or (isinstance(value, tuple) and value):
        parts = list(value.values()) if isinstance(value, Mapping) else list(value)
        if parts and all(map(_is_array, parts)):
            return "arrays"
        if isinstance(value, Mapping):
            raise InvalidArgument(
                "a map of samples is none of arrays: give its items(), or arrays as its values"
            )
    if isinstance(value, list) and value and all(isinstance(item, str | os.PathLike) for item in value):
        formats = {format_of_path(item) for item in value}
        if len(formats) != 1:
            raise InvalidArgument(
                f"a list of paths of several formats, {', '.join(sorted(formats))}: say format="
            )
        return formats.pop()
    if isinstance(value, Iterable) or callable(value):
        return "iterable"
    raise InvalidArgument(
        f"an object of type {type(value).__name__} gives no samples: give a path, arrays or an iterable"
    )


def shards_of(source: Paths, format_: str) -> list[tuple[str, str]]:
    """Paths of the files that ``source`` means, and a short name for each that no other has.

    source   a file, a folder of them, a pattern with "{000..127}", "{a,b}", "*" or "?", or a list of these.
             Patterns with braces keep their order; folders and wildcards are sorted
    """
    if isinstance(source, str | os.PathLike):
        source = [source]
    paths = [path for item in source for path in _expand(os.fspath(item), _SUFFIXES[format_])]
    if not paths:
        raise SampleError(
            f"{os.fspath(source[0]) if source else 'an empty list'} has no files: nothing to pack"
        )
    if len(set(paths)) < len(paths):
        twice = next(path for i, path in enumerate(paths) if path in paths[:i])
        raise InvalidArgument(f"{twice} is named twice: samples would come twice")
    names = [os.path.basename(path) for path in paths]
    if len(set(names)) < len(names):
        above = os.path.commonpath(list(map(os.path.abspath, paths)))
        names = [os.path.relpath(path, above) for path in paths]
    return list(zip(paths, names, strict=True))


def _expand(path: str, pattern: re.Pattern[str]) -> list[str]:
    if os.path.isdir(path):
        found = [name for name in sorted(os.listdir(path), key=os.fsencode) if pattern.search(name)]
        return [os.path.join(path, name) for name in found]
    if os.path.exists(path):
        return [path]
    found = []
    for name in _braces(path):
        matches = sorted(glob.glob(name), key=os.fsencode) if _is_wild(name) else [name]
        missing = [match for match in matches if not os.path.exists(match)] or ([] if matches else [name])
        if missing:
            raise SampleError(f"{missing[0]} does not exist" + (f" (from {path})" if name != path else ""))
        found += matches
    return found


def _braces(path: str) -> list[str]:
    """Text with each "{a,b}" and "{000..127}" in it replaced by all it stands for."""
    pieces = _BRACES.split(path)
    choices: list[list[str]] = []
    for i, piece in enumerate(pieces):
        bounds = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", piece)
        if i % 2 == 0:
            choices.append([piece])
        elif bounds:
            begin, end = int(bounds[1]), int(bounds[2])
            if end - begin >= _MOST_SHARDS:
                raise InvalidArgument(f"{path} stands for {end - begin + 1} files: more than {_MOST_SHARDS}")
            choices.append([str(number).zfill(len(bounds[1])) for number in range(begin, end + 1)])
        elif "," in piece:
            choices.append(piece.split(","))
        else:
            choices.append([f"{{{piece}}}"])
    return ["".join(parts) for parts in product(*choices)]


def _is_wild(path: str) -> bool:
    return any(sign in path for sign in "*?[")


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "__array__")


def _format_of_folder(path: str) -> str:
    if os.path.exists(os.path.join(path, "dataset_dict.json")):
        return "arrow"
    if os.path.exists(os.path.join(path, "state.json")) and os.path.exists(
        os.path.join(path, "dataset_info.json")
    ):
        return "arrow"
    if _is_mds(os.path.join(path, "index.json")):
        return "mds"
    shards: str | None = None
    with os.scandir(path) as entries:  # stops at the first file that is no shard
        for entry in entries:
            if _BESIDE_SHARDS.search(entry.name):
                continue
            format_ = next((key for key, pattern in _SUFFIXES.items() if pattern.search(entry.name)), None)
            if not entry.is_file() or format_ in (None, "arrays") or shards not in (None, format_):
                return "folder"
            shards = format_
    return shards or "folder"


class _Shard(msgspec.Struct):
    format: str


class _Index(msgspec.Struct):
    shards: list[_Shard]


def _is_mds(index: str) -> bool:
    """Whether it is an index of MDS shards, however many: what else it says is stepped over."""
    try:
        with open(index, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            shards = msgspec.json.decode(text, type=_Index).shards
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError):
        return False
    return bool(shards) and shards[0].format == "mds"
