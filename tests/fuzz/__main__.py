"""Hostile files, found by coverage: each is read as what was written, or refused by an error of penstock.

    python -m tests.fuzz TARGET [arguments of libFuzzer, such as -max_total_time=60] [CORPUS]

Needs atheris. The parsers in C++ have programs of their own: csrc/tests/fuzz.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import tempfile
from collections.abc import Callable, Iterator
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
from penstock.samples import encoding
from penstock.simulator import simulate
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


def targets() -> dict[str, Target]:
    trace, hardware = five_kernels(), machine()
    made = plan(trace, hardware, "g10", device_budget_bytes=200)
    state = {"a": torch.zeros(2), "b": [torch.ones(3), 1.5, None, ("x", b"y")], 3: {"c": True}}
    fields = {"image": np.arange(6, dtype=np.uint8).reshape(2, 3), "number": 1, "list": ["a", None]}
    entries = laid_out(("a", "F32", (2, 3)), ("b", "BF16", ()))
    header = encode(entries, tree="{}", alignment_bytes=64) + bytes(entries[-1].end)
    return {
        "plan": Target(_plan, (files.encoded(made),)),
        "trace": Target(_value(Trace), (files.encoded(trace),)),
        "hardware": Target(_value(Hardware), (files.encoded(hardware),)),
        "timeline": Target(_value(Timeline), (files.encoded(simulate(trace, made, hardware)),)),
        "io_costs": Target(_value(CostTables), (files.encoded(CostTables({})),)),
        "checkpoint_header": Target(_header, (header,)),
        "checkpoint_tree": Target(_tree, (flatten(state)[1].encode(),)),
        "sample": Target(encoding.decode, (encoding.encode(fields),)),
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
    known = targets()
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
