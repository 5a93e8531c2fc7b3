"""What can be packed, each a file: adding one takes a file and a line in `penstock.options.FORMATS`."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from penstock.errors import InvalidArgument
from penstock.options import FORMATS as MODULES
from penstock.samples.builder import Block
from penstock.samples.sources.paths import format_of_path, format_of_value
from penstock.samples.sources.source import RawSample, Source

_OF_ONE_PATH = ("folder", "mds", "arrays")

__all__ = ["FORMATS", "Block", "RawSample", "Source", "open_source"]

FORMATS: dict[str, Callable[..., Source]] = {
    name: getattr(import_module(f"penstock.samples.sources.{module}"), f"open_{name}")
    for name, module in MODULES.items()
}


def open_source(source: Any, *, format: str | None = None, **options: Any) -> Source:
    """The samples of almost anything.

    source   a path: a folder tree of files, tar shards, TFRecords, Parquet or Arrow files, a dataset that
             Hugging Face datasets or MosaicML streaming saved, .npy or .npz; for shards also a pattern, as
             "train-{000..127}.tar" or "*.parquet", or a list of paths; an array, or a map of arrays; a
             datasets.Dataset; an iterable, as `open_iterable` says; or a Source, which is returned
    format   a key of FORMATS; otherwise found out
    options  of that format: see its open function

    Raises InvalidArgument for what is none of these, SampleError where it cannot be read.
    """
    if format is None:
        if hasattr(source, "of_rank") and hasattr(source, "encoding"):
            if options:
                raise InvalidArgument(f"a source is open already, and takes no options: {', '.join(options)}")
            opened: Source = source
            return opened
        format = format_of_path(source) if isinstance(source, str | os.PathLike) else format_of_value(source)
    if format not in FORMATS:
        raise InvalidArgument(f"format={format!r} is unknown: choose one of {', '.join(FORMATS)}")
    parameters = signature(FORMATS[format]).parameters.values()
    known = [option.name for option in parameters if option.kind is Parameter.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            raise InvalidArgument(
                f"format {format!r} has no option {name!r}, only {', '.join(known) or 'none'}"
            )
    are_paths = isinstance(source, list) and all(isinstance(each, str | os.PathLike) for each in source)
    if format in _OF_ONE_PATH and are_paths:
        if len(source) == 1:
            return FORMATS[format](source[0], **options)
        raise InvalidArgument(
            f"format {format!r} takes one path, not {len(source)}: pack each to a store of its own and mount "
            "them together, or, of folders, give the one that they lie in"
        )
    return FORMATS[format](source, **options)
