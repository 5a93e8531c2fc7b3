"""The sample store's directory: building it, finding names in it, mounting a large one.

    python benchmarks/samples_directory.py -o out/samples_directory.json

Parts:

build    samples a second of one thread: names and bytes to the pieces of a store, then the lookup
lookup   time and memory of a look-up by name, for the store's own lookup and what could take its place: a
         sorted array, AVL trees (those of DLFS, section III-B), a Python dict. C++ rows come from
         benchmarks/programs/directory_benchmark.cpp, which is built for this: it needs CMake and a compiler
mount    seconds until a store of many samples of no bytes is mounted, and until a name was found in it, in a
         fresh process, from the page cache (warm) and from the disk (cold)

Names have 16 random letters; they are looked for in random order, all of them there. "one": one call each;
"many": a hundred thousand in one call. Every index found is compared, outside of the time. The host of a
virtual machine may cache what is cold here. The JSON holds every time. `--quick` checks that it all works;
its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from io_bench.machine import heading
from io_bench.measure import files_under, make_cold, make_warm
from rich.console import Console
from rich.table import Table

from penstock import _native
from penstock.samples import layout
from penstock.samples.builder import Block, Builder, Pieces, lookup_of
from penstock.samples.manifest import DataFile, FileSum, StoreManifest
from penstock.storage.checksum import crc32c

ROOT = Path(__file__).resolve().parents[1]
NAME_BYTES = 16
CHUNK_BYTES = 256 << 10
TAKE_SAMPLES = 20_000
FRESH = """
import sys, time, penstock.samples
begin_s = time.perf_counter()
store = penstock.samples.mount(sys.argv[1])
mounted_s = time.perf_counter()
assert store.index(sys.argv[2]) == int(sys.argv[3])
print(mounted_s - begin_s, time.perf_counter() - mounted_s, len(store))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(highlight=False)
    console.width = max(console.width, 110)
    document: dict[str, Any] = {
        **heading("samples_directory", options.directory),
        "seed": options.seed,
        "rounds": options.rounds,
        "quick": options.quick,
        "parts": {},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="samples_directory.") as folder:
        for part in options.parts:
            with console.status(part):
                document["parts"][part] = PARTS[part](options, Path(folder))
            console.print(SHOWN[part](document["parts"][part]))
            options.output.write_text(json.dumps(document, indent=1))
    console.print(f"wrote {options.output}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("out/samples_directory.json"))
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--samples", type=int, nargs="+", help="sizes of the directories to look up in")
    parser.add_argument("--mounted", type=int, help="samples of the store that is mounted")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    options.samples = options.samples or ([20_000] if options.quick else [1_000_000, 10_000_000])
    options.mounted = options.mounted or (100_000 if options.quick else 50_000_000)
    return options


def names_of(begin: int, end: int) -> np.ndarray:
    """[end - begin, 16] uint8: letters that look random, and differ from sample to sample."""
    mixed = np.arange(begin, end, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    places = np.arange(NAME_BYTES, dtype=np.uint64) * np.uint64(4)
    return (((mixed[:, None] >> places) & np.uint64(15)) + np.uint64(ord("a"))).astype(np.uint8)


def ends_of(count: int, size_bytes: int) -> np.ndarray:
    return np.arange(1, count + 1, dtype=np.int64) * size_bytes


class Columns:
    """A store's directory, names and anchors in memory, of samples of no bytes."""

    def __init__(self, samples: int) -> None:
        builder = Builder(CHUNK_BYTES, layout.DATA_FILE_BYTES)
        self.parts: dict[str, list[bytes]] = {}
        for begin in range(0, samples, 1_000_000):
            names = names_of(begin, min(begin + 1_000_000, samples))
            nothing, count = np.empty(0, np.uint8), len(names)
            builder.add_many(Block(names.reshape(-1), ends_of(count, NAME_BYTES), nothing, ends_of(count, 0)))
            self.keep(builder.take())
        builder.finish()
        self.keep(builder.take())
        self.data_files = builder.data_files
        self.directory = self.column("directory", np.uint64).reshape(-1, 2)
        self.names = self.column("names", np.uint8)
        self.anchors = self.column("anchors", np.uint64)

    def keep(self, pieces: Pieces) -> None:
        for name in ("directory", "sums", "chunks", "names", "anchors"):
            self.parts.setdefault(name, []).append(pieces[1][f"{name}.bin"])

    def column(self, name: str, dtype: type) -> np.ndarray:
        return np.frombuffer(b"".join(self.parts.pop(name)), dtype)

    def lookup(self) -> np.ndarray:
        lookup, twins = lookup_of(self.directory, self.names, self.anchors)
        assert twins is None
        return lookup


def timed(act: Callable[[], Any]) -> float:
    begin_s = time.perf_counter()
    act()
    return time.perf_counter() - begin_s


def measure_build(options: argparse.Namespace, _folder: Path) -> list[dict[str, Any]]:
    samples = 40_000 if options.quick else 2_000_000
    rows = []
    for size_bytes in (64, 128, 512):
        random = np.random.default_rng(options.seed)
        data = random.integers(0, 256, TAKE_SAMPLES * size_bytes, np.uint8)
        rounds: dict[str, list[float]] = {"pieces_s": [], "lookup_s": []}
        for _ in range(options.rounds):
            for name, seconds in build(samples, size_bytes, data).items():
                rounds[name].append(seconds)
        rows.append({"size_bytes": size_bytes, "samples": samples, **rounds})
    return rows


def build(samples: int, size_bytes: int, data: np.ndarray) -> dict[str, float]:
    """Seconds to make all pieces of a store, and its lookup. What would go to data files is let go."""
    builder = Builder(CHUNK_BYTES, layout.DATA_FILE_BYTES)
    kept: dict[str, list[bytes]] = {"directory": [], "names": [], "anchors": []}
    pieces_s = 0.0
    for begin in range(0, samples, TAKE_SAMPLES):
        names = names_of(begin, begin + TAKE_SAMPLES).reshape(-1)
        name_ends, data_ends = ends_of(TAKE_SAMPLES, NAME_BYTES), ends_of(TAKE_SAMPLES, size_bytes)
        begin_s = time.perf_counter()
        builder.add_many(Block(names, name_ends, data, data_ends))
        pieces = builder.take()
        pieces_s += time.perf_counter() - begin_s
        for name, parts in kept.items():
            parts.append(pieces[1][f"{name}.bin"])
    arrays = [np.frombuffer(b"".join(parts), np.uint8) for parts in kept.values()]
    directory, anchors = arrays[0].view(np.uint64).reshape(-1, 2), arrays[2].view(np.uint64)
    return {
        "pieces_s": pieces_s,
        "lookup_s": timed(lambda: lookup_of(directory, arrays[1], anchors)),
    }


def measure_lookup(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rows = []
    program = build_program(folder)
    lookups = 10_000 if options.quick else 500_000
    for samples in options.samples:
        command = [str(program), str(samples), str(lookups), str(options.rounds)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rows += [{"language": "C++", "samples": samples, **row} for row in found["rows"]]
        rows += measure_in_python(samples, lookups, options)
    return rows


def build_program(folder: Path) -> Path:
    build = folder / "build"
    configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-D", "PENSTOCK_TESTS=ON"]
    subprocess.run([*configure, "-D", "CMAKE_BUILD_TYPE=Release"], check=True, capture_output=True)
    make = ["cmake", "--build", str(build), "--target", "directory_benchmark"]
    subprocess.run(make, check=True, capture_output=True)
    return build / "csrc" / "tests" / "directory_benchmark"


def measure_in_python(samples: int, lookups: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    columns = Columns(samples)
    wanted = np.random.default_rng(options.seed).integers(0, samples, lookups)
    all_names = names_of(0, samples)
    matrix = np.ascontiguousarray(all_names[wanted])
    flat, ends = matrix.reshape(-1), ends_of(lookups, NAME_BYTES)
    single = [name.tobytes() for name in matrix]
    rows = []

    def row(name: str, how: str, per_sample: float, find: Callable[[], Sequence[int] | np.ndarray]) -> None:
        times = []
        for _ in range(options.rounds):
            begin_s = time.perf_counter()
            found = find()
            times.append((time.perf_counter() - begin_s) / lookups)
            assert np.array_equal(found, wanted)
        rows.append(
            {
                "language": "Python",
                "samples": samples,
                "name": name,
                "how": how,
                "bytes_per_sample": per_sample,
                "lookup_s": times,
            }
        )

    lookup = columns.lookup()
    per_sample = (lookup.nbytes + columns.anchors.nbytes + columns.directory.nbytes) / samples
    names = _native.SampleNames(columns.directory, columns.names, columns.anchors, lookup)
    find_one = names.find
    row("penstock", "one", per_sample, lambda: [find_one(name) for name in single])
    row("penstock", "many", per_sample, lambda: find_in_calls(names, flat, ends))

    keys = columns.directory[:, 0]  # data file 0: the place is the key
    order = np.argsort(keys)
    sorted_keys, wanted_keys = keys[order], keys[wanted]  # hashing is left out, in its favour
    row("numpy.searchsorted", "many", 16, lambda: order[np.searchsorted(sorted_keys, wanted_keys)])

    table = {name.tobytes(): index for index, name in enumerate(all_names)}
    own_bytes = sys.getsizeof(table) / samples + sys.getsizeof(single[0]) + sys.getsizeof(1)
    row("dict", "one", own_bytes, lambda: [table[name] for name in single])
    return rows


def find_in_calls(names: _native.SampleNames, flat: np.ndarray, ends: np.ndarray) -> np.ndarray:
    calls, at_once = [], 100_000
    for begin in range(0, len(ends), at_once):
        part = ends[begin : begin + at_once] - begin * NAME_BYTES
        calls.append(names.find_many(flat[begin * NAME_BYTES :], part))
    return np.concatenate(calls)


def measure_mount(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    store = folder / "store"
    size_bytes = write_store(store, options.mounted)
    index = options.mounted // 3
    name = names_of(index, index + 1).tobytes().decode()
    found: dict[str, Any] = {"samples": options.mounted, "size_bytes": size_bytes, "warm": [], "cold": []}
    for state, prepare in (("warm", make_warm), ("cold", make_cold)):
        for _ in range(options.rounds):
            for path in files_under(store):
                prepare(path)
            command = [sys.executable, "-c", FRESH, str(store), name, str(index)]
            told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
            assert int(told[2]) == options.mounted
            found[state].append({"mount_s": float(told[0]), "first_name_s": float(told[1])})
    return found


def write_store(folder: Path, samples: int) -> int:
    """A store of so many samples of no bytes; gives the size of its files."""
    folder.mkdir()
    columns = Columns(samples)
    contents = {
        layout.DIRECTORY: columns.directory.view(np.uint8).reshape(-1),
        layout.SUMS: columns.column("sums", np.uint8),
        layout.CHUNKS: columns.column("chunks", np.uint8),
        layout.NAMES: columns.names,
        layout.ANCHORS: columns.anchors.view(np.uint8),
        layout.LOOKUP: columns.lookup(),
    }
    for name, content in contents.items():
        content.tofile(folder / name)
    (folder / layout.data_file_name(0)).write_bytes(bytes(CHUNK_BYTES))
    sums = {name: FileSum(size_bytes=c.nbytes, crc32c=crc32c(c)) for name, c in contents.items()}
    data_files = tuple(
        DataFile(samples=count, chunks=chunks, size_bytes=size_bytes)
        for count, chunks, size_bytes in columns.data_files
    )
    manifest = StoreManifest(samples=samples, chunk_bytes=CHUNK_BYTES, data_files=data_files, files=sums)
    manifest.save(folder / layout.MANIFEST)
    return sum(content.nbytes for content in contents.values())


def show_build(rows: list[dict[str, Any]]) -> Table:
    table = Table("sample bytes", "pieces, M/s", "lookup, M/s", "both, M/s", title="build, one thread")
    for row in rows:
        pieces_s, lookup_s = statistics.median(row["pieces_s"]), statistics.median(row["lookup_s"])
        rates = [row["samples"] / seconds / 1e6 for seconds in (pieces_s, lookup_s, pieces_s + lookup_s)]
        table.add_row(str(row["size_bytes"]), *(f"{rate:.1f}" for rate in rates))
    return table


def show_lookup(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "samples", "from", "structure", "how", "ns", "least", "most", "bytes a sample", title="look-up"
    )
    for row in rows:
        times = sorted(1e9 * seconds for seconds in row["lookup_s"])
        cells = (statistics.median(times), times[0], times[-1])
        table.add_row(
            f"{row['samples']:,}",
            row["language"],
            row["name"],
            row["how"],
            *(f"{cell:.0f}" for cell in cells),
            f"{row['bytes_per_sample']:.1f}",
        )
    return table


def show_mount(part: dict[str, Any]) -> Table:
    title = f"mount {part['samples']:,} samples, {part['size_bytes'] / 1e9:.2f} GB"
    table = Table("page cache", "mount, s", "first name, s", title=title)
    for state in ("warm", "cold"):
        medians = [statistics.median(run[key] for run in part[state]) for key in ("mount_s", "first_name_s")]
        table.add_row(state, *(f"{seconds:.3f}" for seconds in medians))
    return table


PARTS: dict[str, Callable[[argparse.Namespace, Path], Any]] = {
    "build": measure_build,
    "lookup": measure_lookup,
    "mount": measure_mount,
}
SHOWN: dict[str, Callable[[Any], Table]] = {
    "build": show_build,
    "lookup": show_lookup,
    "mount": show_mount,
}

if __name__ == "__main__":
    sys.exit(main())
