"""What encryption costs tensors that are spilled to a remote drive: the same transfers with it and without.

    python benchmarks/encrypted_spill.py -o out/encrypted_spill.json

The target is the tests', in memory, on the loopback: the network costs next to nothing. In alternating turns
all buffers are written, then read; the first turn is not counted. Rates, and processor time of this process,
the host, for a gigabyte. What came back is compared outside of the times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from io_bench.machine import heading

from penstock.storage.aligned import AlignedBuffer
from penstock.storage.spill import SpillSpace
from tests.support.remote_stores import MIB, serving, url_of

SPACES = {"in the clear": "&encrypt=0", "encrypted": "&encrypt=1"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--buffers", type=int, default=24)
    parser.add_argument("--mib", type=int, default=8, help="MiB of a buffer")
    parser.add_argument("--directory", default="/dev/shm", help="of the target's files")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    size_bytes = options.mib * MIB
    buffers = [AlignedBuffer(size_bytes) for _ in range(options.buffers)]
    content = np.random.default_rng(1).bytes(size_bytes)
    rows: dict[str, list[dict[str, float]]] = {}
    with (
        tempfile.TemporaryDirectory(dir=options.directory) as folder,
        serving(
            Path(folder), size_bytes=2 * options.buffers * size_bytes + 16 * MIB, subsystems=len(SPACES)
        ) as target,
    ):
        spaces = {
            name: SpillSpace(url_of(target, number, how)) for number, (name, how) in enumerate(SPACES.items())
        }
        extents = {name: [space.allocate(size_bytes) for _ in buffers] for name, space in spaces.items()}
        for turn in range(options.turns):
            for name, space in spaces.items():
                for buffer in buffers:
                    buffer.view()[:] = content
                for what in ("write", "read"):
                    measured = move(space, what, extents[name], buffers)
                    if turn:
                        rows.setdefault(f"{name}, {what}", []).append(measured)
                    for buffer in buffers:
                        assert bytes(buffer.view()) == content
                        buffer.view()[:] = bytes(size_bytes) if what == "write" else content
        for space in spaces.values():
            space.close()
    for name, found in rows.items():
        rates, processor = ([row[key] for row in found] for key in ("bytes_per_s", "processor_s_per_gb"))
        print(
            f"{name:<22} {statistics.median(rates) / 1e9:5.2f} GB/s ({min(rates) / 1e9:.2f} to "
            f"{max(rates) / 1e9:.2f})   processor {statistics.median(processor):.2f} s/GB"
        )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({**heading("encrypted_spill"), "rows": rows}, indent=1))
        print(f"wrote {options.output}")


def move(space: SpillSpace, what: str, extents: list[Any], buffers: list[AlignedBuffer]) -> dict[str, float]:
    """All of them at once."""
    ended, errors = threading.Semaphore(0), []

    def on_done(transfer: Any) -> None:
        errors.extend([transfer.error] if transfer.error else [])
        ended.release()

    begun_s, used_s = time.perf_counter(), time.process_time()
    for extent, buffer in zip(extents, buffers, strict=True):
        getattr(space, what)(extent, buffer.address, buffer.size_bytes, buffer, on_done)
    for _ in extents:
        ended.acquire()
    took_s, used_s = time.perf_counter() - begun_s, time.process_time() - used_s
    if errors:
        raise errors[0]
    moved_bytes = sum(buffer.size_bytes for buffer in buffers)
    return {"bytes_per_s": moved_bytes / took_s, "processor_s_per_gb": used_s / moved_bytes * 1e9}


if __name__ == "__main__":
    main()
