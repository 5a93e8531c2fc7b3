"""The commands on checkpoint files. Each returns an Answer; nothing is printed here."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections import Counter
from typing import Any

from penstock import checkpoint
from penstock.checkpoint import CheckpointInfo
from penstock.cli.output import Answer, Table
from penstock.units import counted, format_bytes


def info(options: Namespace) -> Answer:
    found = checkpoint.info(options.file)
    rows = [
        (
            tensor.name,
            tensor.dtype,
            " x ".join(map(str, tensor.shape)) or "scalar",
            format_bytes(tensor.size_bytes),
            "" if tensor.crc32c is None else f"{tensor.crc32c:08x}",
        )
        for tensor in found.tensors
    ]
    shown: list[str | Table] = [_summary(found)]
    shown += [f"{key}: {value}" for key, value in found.metadata.items()]
    shown.append(Table(("tensor", "type", "shape", "size", "CRC-32C"), rows))
    return Answer(values=_values(found), shown=shown)


def verify(options: Namespace) -> Answer:
    found = checkpoint.verify(options.file)
    verdict = "every checksum is right"
    if not found.checksummed:
        verdict = "there are no checksums: only its structure could be verified"
    return Answer(values={**_values(found), "sound": True}, shown=[_summary(found), verdict])


def convert(options: Namespace) -> Answer:
    found = checkpoint.convert(options.source, options.destination, overwrite=options.overwrite)
    return Answer(values=_values(found), shown=[_summary(found)], written=[options.destination])


pack = cp = convert  # each is told where from and where to


def ls(options: Namespace) -> Answer:
    found = checkpoint.ls(options.directory)
    rows = [
        (
            str(each.step),
            format_bytes(each.tensor_bytes),
            format_bytes(each.size_bytes),
            each.problem or ", ".join(each.elsewhere) or "none",
        )
        for each in found
    ]
    shown = Table(("step", "tensors", "file", "others that it needs"), rows)
    values = {"checkpoints": [dataclasses.asdict(each) for each in found]}
    return Answer(values=values, shown=[shown if found else f"no checkpoints in {options.directory}"])


def _summary(found: CheckpointInfo) -> str:
    writer = {
        "penstock": "a checkpoint of penstock",
        "safetensors": "a safetensors file of another writer",
        "torch": "a file of torch.save",
    }[found.format]
    types = Counter(tensor.dtype for tensor in found.tensors)
    by_type = ", ".join(f"{count} {name}" for name, count in types.most_common()) or "none"
    others = f", of which some lie in {', '.join(found.elsewhere)}" if found.elsewhere else ""
    return (
        f"{found.path}: {writer}, {format_bytes(found.size_bytes)}\n"
        f"{counted(len(found.tensors), 'tensor')} ({by_type}), {format_bytes(found.tensor_bytes)}{others}"
    )


def _values(found: CheckpointInfo) -> dict[str, Any]:
    return {**dataclasses.asdict(found), "tensor_bytes": found.tensor_bytes}
