"""Hostile files, found by coverage: each is read as what was written, or refused by an error of penstock.

    python -m tests.fuzz TARGET [arguments of libFuzzer, such as -max_total_time=60] [CORPUS]

Needs atheris. The parsers in C++ have programs of their own: csrc/tests/fuzz.
"""

from __future__ import annotations

import contextlib
import gc
import json
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import atheris
import numpy as np
import torch

from penstock.checkpoint.header import decode, encode, header_bytes
from penstock.checkpoint.tree import flatten, unflatten
from penstock.core import files
from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.errors import PenstockError
from penstock.planners import plan
from penstock.samples import Loader, Mixture, encoding, mount, pack, packed
from penstock.samples.layout import MANIFEST
from penstock.samples.manifest import StoreManifest, decoded_manifest
from penstock.samples.remote import layout
from penstock.simulator import simulate
from penstock.storage.checksum import crc32c
from penstock.storage.costs import CostTables
from penstock.storage.nvme.contents import known_contents, marker_of
from penstock.storage.nvme.url import parse_portal, parse_url
from penstock.units import parse_budget, parse_bytes, parse_endurance, parse_share
from tests.support.headers import laid_out
from tests.support.traces import five_kernels, machine

MOST_BYTES = 1 << 16
Read = Callable[[bytes], Any]


class Target(NamedTuple):
    read: Read
    seeds: tuple[bytes, ...]  # what is well made


def _value(kind: type) -> Read:
    return lambda data: files.decoded(kind, data, "file")


def _plan(data: bytes) -> None:
    """A plan with its trace, which C++ replays."""
    found = files.decoded(Plan, data, "file")
    trace = found.trace
    if trace is None or max(trace.kernels, trace.tensors) > 1000:
        return
    for judge in (check, simulate):
        with contextlib.suppress(PenstockError):
            judge(trace, found, machine())


def _header(data: bytes) -> None:
    length = header_bytes(data[:8], len(data), "file")
    decode(data[:length], len(data), "file")


def _tree(data: bytes) -> None:
    unflatten(data.decode(errors="replace"), {"a": torch.zeros(2), "b.0": torch.ones(3)}, "file")


def _text(data: bytes) -> None:
    text = data.decode(errors="replace")
    for read in (parse_url, parse_portal, parse_bytes, parse_budget, parse_share, parse_endurance):
        with contextlib.suppress(PenstockError):
            read(text)


def _namespace(data: bytes) -> None:
    known_contents(data.ljust(1 << 16, b"\0"))
    marker_of(data.ljust(1 << 16, b"\0"))


def _manifest(data: bytes) -> None:
    """As it is, and with a checksum that is right, which coverage does not find."""
    with contextlib.suppress(PenstockError):
        decoded_manifest(data, "file")
    sealed = files.decoded(StoreManifest, data, "file").sealed()
    read = decoded_manifest(files.encoded(sealed), "file")
    assert read == sealed and read.identity == sealed.identity and read.file_sizes == sealed.file_sizes


def _superblock(data: bytes) -> None:
    """The fields of a superblock, and behind them a table and progress. Checksums are right."""
    fields_bytes = layout.SUPERBLOCK_BYTES - 4
    fields, rest = data[:fields_bytes].ljust(fields_bytes, b"\0"), data[fields_bytes:]
    copy = fields + struct.pack("<I", crc32c(fields))
    found, _ = layout.find_superblock((copy, bytes(len(copy))), 1 << 40, "namespace")
    if found is None:
        return
    table = rest[: found.table_bytes]
    layout.decoded_progress(rest[: len(rest) // 16 * 16], found)
    layout.decoded_table(table, replace(found, table_crc32c=crc32c(table)), "namespace")


def _states(folder: Path) -> Target:
    """Of loaders: a store's, a mixture's and one of packed sequences."""
    rows = [{"tokens": np.arange(size, dtype=np.int32)} for size in (3, 9, 5, 1, 7, 4, 8, 2)]
    pack(rows, folder / "store")
    loaders = [
        Loader(mount(folder / "store"), batch_size=2, collate_fn=list),
        Loader(
            Mixture({mount(folder / "store"): 2.0, mount(folder / "store"): 1.0}),
            batch_size=2,
            collate_fn=list,
        ),
        Loader(packed(mount(folder / "store"), 8, tokens="tokens"), batch_size=1, collate_fn=list),
    ]
    seeds = []
    for loader in loaders:
        batches = iter(loader)
        next(batches)
        seeds.append(json.dumps(loader.state_dict()).encode())
        batches.close()

    def read(data: bytes) -> None:
        try:
            state = json.loads(data)
        except (ValueError, RecursionError):
            return
        for loader in loaders:
            with contextlib.suppress(PenstockError):
                loader.load_state_dict(state)
                list(islice(loader, 2))

    return Target(read, tuple(seeds))


def _a_superblock() -> bytes:
    planned = layout.plan_upload({MANIFEST: 100, "data-00000.bin": 1 << 20})
    table = layout.encoded_table(planned.files)
    superblock = replace(planned.superblock, namespace_bytes=1 << 40)
    return layout.completed(superblock, table).encoded()[:-4] + table


def targets(folder: Path) -> dict[str, Target]:
    trace, hardware = five_kernels(), machine()
    made = plan(trace, hardware, "g10", device_budget=200)
    state = {"a": torch.zeros(2), "b": [torch.ones(3), 1.5, None, ("x", b"y")], 3: {"c": True}}
    fields = {"image": np.arange(6, dtype=np.uint8).reshape(2, 3), "number": 1, "list": ["a", None]}
    entries = laid_out(("a", "F32", (2, 3)), ("b", "BF16", ()))
    header = encode(entries, tree="{}", alignment_bytes=64) + bytes(entries[-1].end)
    states = _states(folder)
    return {
        "plan": Target(_plan, (files.encoded(made),)),
        "trace": Target(_value(Trace), (files.encoded(trace),)),
        "hardware": Target(_value(Hardware), (files.encoded(hardware),)),
        "timeline": Target(_value(Timeline), (files.encoded(simulate(trace, made, hardware)),)),
        "io_costs": Target(_value(CostTables), (files.encoded(CostTables({})),)),
        "checkpoint_header": Target(_header, (header,)),
        "checkpoint_tree": Target(_tree, (flatten(state)[1].encode(),)),
        "sample": Target(encoding.decode, (encoding.encode(fields),)),
        "manifest": Target(_manifest, ((folder / "store" / MANIFEST).read_bytes(),)),
        "superblock": Target(_superblock, (_a_superblock(),)),
        "loader_state": states,
        "text": Target(_text, (b"nvme+tcp://[::1]:4420/nqn.2014-08.org.example:a?ns=1", b"1.5GiB", b"50%")),
        "namespace": Target(_namespace, (b"penstock",)),
    }


@contextlib.contextmanager
def corpus(seeds: tuple[bytes, ...]) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(seeds):
            (Path(folder) / str(number)).write_bytes(seed)
        yield folder


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        fuzz(targets(Path(folder)))


def fuzz(known: dict[str, Target]) -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in known:
        sys.exit(f"give a target: {', '.join(known)}")
    target = known[sys.argv[1]]

    def one_input(data: bytes) -> None:
        with contextlib.suppress(PenstockError):
            target.read(data)

    # An editable installation has a loader that `instrument_imports` does not know, and torch is too much for
    # `instrument_all`.
    for found in gc.get_objects():
        if isinstance(found, FunctionType) and str(found.__module__).startswith("penstock"):
            atheris.instrument_func(found)
    with corpus(target.seeds) as folder:
        atheris.Setup([*sys.argv[1:], f"-max_len={MOST_BYTES}", folder], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
