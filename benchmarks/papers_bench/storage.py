"""Fastensor's claims on transfers, and DLFS's on samples: what the benchmarks of each part measure."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from io_bench import adaptive
from io_bench.checkpoints import measure_checkpoints
from io_bench.transfers import measure_size

from papers_bench.rows import Row
from penstock.units import format_bytes, format_rate

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
QUICK_STEP = adaptive.Step((3 * MIB, 64 << 10, MIB) * 4, tuple(reversed(range(12))))
Told = Callable[[str], None]
Found = tuple[list[Row], dict[str, Any]]


def choice(directory: str, quick: bool, tell: Told) -> Found:
    """Tables 13 and 14: what the choice of the way reaches of the optimum, known only afterwards."""
    step = QUICK_STEP if quick else adaptive.demo_step()
    with tempfile.TemporaryDirectory(dir=directory, prefix="papers.") as folder:
        found = adaptive.measure_step(
            Path(folder), step, 2 if quick else 6, 0, lambda text: tell(f"choice of the way: {text}")
        )
    single = {name: one for name, one in found["contenders"].items() if name not in adaptive.CHOICES}
    allowed = {name: one for name, one in single.items() if one["domain"] == "disk"}
    samples = {name: _totals(one) for name, one in allowed.items()}
    optimum_s = [min(each) for each in zip(*samples.values(), strict=True)]
    own_s = _totals(found["contenders"]["adaptive, disk"])

    def of_optimum(taken: list[float]) -> str:
        fractions = [best / one for best, one in zip(optimum_s, taken, strict=True)]
        low, middle, high = statistics.quantiles(fractions, n=4) if fractions[1:] else fractions * 3
        return f"{middle:.0%} ({low:.0%} to {high:.0%})"

    shares = found["choices"]["adaptive, disk"]["rounds"]["shares"]["write+read"]
    conditions = (
        f"the transfers of a training step of a GPT ({len(step.sizes_bytes)} tensors, "
        f"{format_bytes(sum(step.sizes_bytes))}, "
        "out and in), as many in flight as a run has, to the disk only"
    )
    rows = []
    for name, published in (("First", "79.6 %, 85.4 %"), ("Running", ""), ("Best", "88.5 %, 89.2 %")):
        share = shares.get(name)
        if share is not None and share["speed"] is not None:
            rows.append(
                Row(
                    "Fastensor",
                    f"tables 13, 14: share of the optimum's speed, {name}",
                    published,
                    f"{share['speed']:.1%}; the fastest in {share['best']:.1%} of the rounds",
                    f"{conditions}; medians of the rounds of each size class",
                )
            )
    rows.append(
        Row(
            "Fastensor",
            "of the fastest single way in each round, end to end",
            "",
            f"{of_optimum(own_s)} the choice; "
            + ", ".join(f"{of_optimum(taken)} {name}" for name, taken in samples.items()),
            f"{conditions}; wall time of whole rounds, median and quartiles; above 100 % where no single "
            f"way is best for all sizes",
        )
    )
    rows.append(
        Row(
            "Fastensor",
            "share of the optimum's speed of torch's own tool alone",
            "16.0 %, 8.2 %",
            "not measured so",
            "torch's files are not among penstock's ways; the transfers below compare them",
        )
    )
    return rows, found


def _totals(one: dict[str, Any]) -> list[float]:
    return [sum(both) for both in zip(one["samples_write_s"], one["samples_read_s"], strict=True)]


def transfers(directory: str, quick: bool, tell: Told) -> Found:
    """A model's state saved and loaded, and feature maps written and read back, against torch."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=directory, prefix="papers.") as folder:
        saved = measure_checkpoints(
            Path(folder),
            40 * 10**6 if quick else 10**9,
            ["penstock", "torch"],
            2 if quick else 5,
            0,
            quick,
            lambda text: tell(f"checkpoints: {text}"),
        )
        sizes = (3 * MIB,) if quick else (3 * MIB, 9 * MIB, 49 * MIB)
        maps = {
            size: measure_size(
                Path(folder),
                size,
                ["penstock spill", "torch"],
                2 if quick else 5,
                0,
                quick,
                lambda text: tell(f"feature maps: {text}"),
            )
            for size in sizes
        }

    def rate(row: dict[str, Any], kind: str) -> str:
        low, high = row[kind]["quartiles_bytes_per_s"]
        return f"{format_rate(row[kind]['median_bytes_per_s'])} ({format_rate(low)} to {format_rate(high)})"

    own, theirs = saved["rows"]["penstock"], saved["rows"]["torch"]
    for kind, published in (("save+fsync", 5.37), ("cold load", None), ("warm load", None)):
        gain = own[kind]["median_bytes_per_s"] / theirs[kind]["median_bytes_per_s"]
        rows.append(
            Row(
                "Fastensor",
                f"a model's state against torch: {kind}",
                "5.37 x at most (saving)" if published else "",
                f"{gain:.1f} x",
                f"{format_bytes(saved['bytes'])} of a GPT, {rate(own, kind)} against "
                f"{rate(theirs, kind)}; checksums included",
                gain / published if published else None,
            )
        )
    for size, found in maps.items():
        if not {"penstock spill", "torch"} <= found["rows"].keys():
            rows.append(Row("Fastensor", "feature maps", "", "failed", str(found["failed"])))
            continue
        own, theirs = found["rows"]["penstock spill"], found["rows"]["torch"]

        def both(row: dict[str, Any]) -> float:
            return float(row["write"]["median_s"] + row["cold read"]["median_s"])

        gain = both(theirs) / both(own)
        rows.append(
            Row(
                "Fastensor",
                "feature maps written and read back against torch, single tensors",
                "",
                f"{gain:.1f} x",
                f"tensors of {format_bytes(size)}, one at a time and waited for, without fsync; read from "
                f"the disk: "
                f"{rate(own, 'write')} and {rate(own, 'cold read')} against {rate(theirs, 'write')} (page "
                f"cache) and {rate(theirs, 'cold read')}",
            )
        )
    return rows, {"checkpoints": saved, "transfers": {str(size): found for size, found in maps.items()}}


OWN, FULL, FILES = "penstock chunk, bread(64)", "penstock full, bread(64)", "one file per sample"


def samples(directory: str, quick: bool, tell: Told) -> Found:
    """Samples in random order against one file each, as benchmarks/samples.py measures them."""
    sizes = (512,) if quick else (512, 4096, 131072)
    tell("samples: storing and reading")
    with tempfile.TemporaryDirectory(dir=directory, prefix="papers.") as folder:
        output = Path(folder) / "samples.json"
        command = [
            sys.executable,
            str(ROOT / "benchmarks" / "samples.py"),
            "--directory",
            folder,
            "-o",
            str(output),
        ]
        command += ["--sizes", ",".join(map(str, sizes)), "--rows", f"{OWN};{FULL};{FILES}"]
        command += ["--quick"] if quick else ["--rounds", "3"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not output.exists():
            return [Row("DLFS", "samples", "", "failed", done.stderr[-200:])], {}
        found = json.loads(output.read_text())
    rows = []
    small = "9.72 x, average of at most 4 KB"
    published = {512: small, 4096: small, 131072: "1.31 x, average of 16 KB and more"}
    for size, one in found["sizes"].items():
        if any("failed" in row for row in one["rows"].values()):
            rows.append(Row("DLFS", f"samples of {size} B", "", "failed", str(one["rows"])[:200]))
            continue
        micros = {
            name: {
                state: sorted(1e6 * turn["wall_s"] / turn["samples"] for turn in row[state])
                for state in ("cold", "warm")
            }
            for name, row in one["rows"].items()
        }
        own, files = (statistics.median(micros[name]["cold"]) for name in (OWN, FILES))

        def of(name: str, state: str, micros: dict[str, dict[str, list[float]]] = micros) -> str:
            taken = micros[name][state]
            return f"{np.median(taken):.3g} us ({taken[0]:.3g} to {taken[-1]:.3g})"

        rows.append(
            Row(
                "DLFS",
                f"figure 8: samples of {format_bytes(int(size))} in random order over Ext4, one file each, "
                "16 nodes",
                published[int(size)],
                f"{files / own:.1f} x from the disk",
                f"one process and one disk, {one['count']} samples, chunk order: {of(OWN, 'cold')} a "
                f"sample, full order {of(FULL, 'cold')}, "
                f"files {of(FILES, 'cold')}; from the page cache {of(OWN, 'warm')} against "
                f"{of(FILES, 'warm')} (range of the turns)",
            )
        )
    rows += [
        Row(
            "DLFS",
            "memory of the directory",
            "16 B a sample",
            "16 B, and 9 B for names, mapped",
            "by the format: docs/samples.md",
            1.0,
        ),
        Row(
            "DLFS",
            "figure 11: share of what 16 devices give, 128 KB: one client, 16",
            "93.4 %, up to 88 %",
            "by another program",
            "benchmarks/samples_remote.py --parts devices: drives in memory",
        ),
        Row(
            "DLFS",
            "over Ext4 under TensorFlow, 512 B",
            "102 x",
            "not measured",
            "there is no TensorFlow input pipeline here",
        ),
    ]
    return rows, found
