"""Pack data that every machine has, read it faster than its files, and train from it.

    python examples/samples_demo.py

Two stores are made: the source files of Python's standard library, with their packages as classes, and
scikit-learn's digits, sorted by class. Reading the files one by one is held against reading the store; then
a small network is trained for one epoch, fed from the store. Takes half a minute, and leaves the stores in
out/demo-samples.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from penstock import cli
from penstock.samples import Loader, Store, mount, pack
from penstock.units import format_rate, format_seconds

OUT = Path(__file__).resolve().parents[1] / "out" / "demo-samples"
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}
SEED = 0
BATCH = 64
CACHE = "4MiB"

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="to read in each way; default: %(default)s"
    )
    parser.add_argument("-o", "--output", type=Path, default=OUT, metavar="FOLDER", help="for the stores")
    options = parser.parse_args()
    library, digits = options.output / "library", options.output / "digits"
    for store in (library, digits):
        shutil.rmtree(store, ignore_errors=True)
    options.output.mkdir(parents=True, exist_ok=True)

    console.rule("The standard library's source files, as samples", align="left")
    sources = source_files()
    packages = sorted({package_of(name) for name in sources})
    pack(lambda: texts(sources, packages), library, "64KiB", format_options={"classes": packages})
    command("info", str(library), "--batch", str(BATCH), "--cache", "512KiB,1MiB,4MiB")
    compare_bytes(library, sources)
    console.print(
        f"\nRead in a random order: warm, from the page cache, for {options.seconds:g} s;\n"
        "cold, all samples once, after the system was asked to drop them from the page cache\n"
    )
    console.print(throughput(library, sources, options.seconds))

    console.print()
    console.rule("Training on digits that are stored sorted by class", align="left")
    train(digits)
    return 0


def command(*arguments: str) -> None:
    """Show a penstock command, and run it."""
    shown = " ".join(argument.removeprefix(f"{OUT.parents[1]}/") for argument in arguments)
    console.print(f"\n[bold]$ penstock samples {shown}[/bold]", soft_wrap=True)
    if exit_code := cli.main(["samples", *arguments]):
        sys.exit(exit_code)


def source_files() -> dict[str, Path]:
    """Files by their names as samples, in the order of names."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - LEFT_OUT)
        for file in files:
            path = Path(folder) / file
            if file.endswith(".py") and path.is_file():
                found[path.relative_to(root).as_posix()] = path
    return dict(sorted(found.items()))


def package_of(name: str) -> str:
    return name.split("/")[0] if "/" in name else "(modules)"


def texts(sources: dict[str, Path], packages: list[str]) -> Iterator[tuple[str, bytes, int]]:
    for name, path in sources.items():
        yield name, path.read_bytes(), packages.index(package_of(name))


def compare_bytes(library: Path, sources: dict[str, Path]) -> None:
    """Every sample has to be what the file is."""
    with mount(library) as store:
        for name, path in sources.items():
            if store.read(name) != path.read_bytes():
                sys.exit(f"{name} came back changed")
    console.print(f"all {len(sources):,} samples are equal to their files")


def throughput(library: Path, sources: dict[str, Path], seconds: float) -> Table:
    names, paths = list(sources), [str(path) for path in sources.values()]
    order = random.Random(SEED).sample(range(len(names)), len(names))
    data = sorted(str(path) for path in library.glob("data-*.bin"))
    table = Table("", "warm, a sample", "rate", "times", "cold, a sample", "times", box=None)
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    first: tuple[float, float] | None = None
    with (
        mount(library, "full", CACHE) as full,
        mount(library, "chunk", CACHE) as chunk,
    ):
        ways: dict[str, tuple[Callable[[], Iterable[int]], list[str]]] = {
            "files: open, read, close": (lambda: files(paths, order), paths),
            "store.read(name)": (lambda: (len(full.read(names[index])) for index in order), data),
            "store.bread(64), full": (lambda: breads(full), data),
            f"store.bread(64), chunk, {CACHE}": (lambda: breads(chunk), data),
        }
        for way, (read, touched) in ways.items():
            cold_s = once(read, len(names)) if drop(touched) else float("nan")
            size_bytes, samples, time_s = for_a_while(read, seconds)
            warm_s = time_s / samples
            first = first or (warm_s, cold_s)
            table.add_row(
                way,
                format_seconds(warm_s),
                format_rate(size_bytes / time_s),
                f"{first[0] / warm_s:.1f} x",
                format_seconds(cold_s) if cold_s == cold_s else "stays warm here",
                f"{first[1] / cold_s:.1f} x" if cold_s == cold_s else "",
            )
    return table


def files(paths: list[str], order: list[int]) -> Iterator[int]:
    for index in order:
        with open(paths[index], "rb") as file:
            yield len(file.read())


def breads(store: Store) -> Iterator[int]:
    """Bytes of each sample of an epoch."""
    store.sequence(seed=SEED)
    while (batch := store.bread(BATCH)) is not None:
        yield from np.diff(batch.offsets).tolist()


def for_a_while(read: Callable[[], Iterable[int]], seconds: float) -> tuple[int, int, float]:
    """Bytes, samples and time of whole epochs."""
    size_bytes = samples = 0
    began_s = time.perf_counter()
    while (time_s := time.perf_counter() - began_s) < seconds or not samples:
        for sample_bytes in read():
            size_bytes, samples = size_bytes + sample_bytes, samples + 1
    return size_bytes, samples, time_s


def once(read: Callable[[], Iterable[int]], samples: int) -> float:
    """Time of a sample."""
    began_s = time.perf_counter()
    for _ in read():
        pass
    return (time.perf_counter() - began_s) / samples


def drop(paths: list[str]) -> bool:
    """Ask the system to drop the files' pages. Did it, mostly?"""
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return False
    cached = probed = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            if probed < 64 and os.fstat(descriptor).st_size:
                probed += 1
                cached += is_cached(descriptor)
        except OSError:
            return False
        finally:
            os.close(descriptor)
    return cached * 4 < max(probed, 1)


def is_cached(descriptor: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], os.fstat(descriptor).st_size // 2, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False


def train(digits: Path) -> None:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    by_class = np.argsort(labels, kind="stable")
    x, y = (pixels[by_class] / 16).astype(np.float32), labels[by_class].astype(np.int32)
    tested = np.arange(len(y)) % 4 == 3
    pack({"x": x[~tested], "y": y[~tested]}, digits, "4KiB", format_options={"label_field": "y"})
    command("info", str(digits), "--batch", "16", "--cache", "256KiB,768KiB")
    console.print("\nOne epoch of training; accuracy on images that were left out, of 5 seeds\n")
    table = Table("order", "cache", "accuracy", "from", "to", "time of the epoch", box=None)
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for order, cache in (("as stored", ""), ("chunk", "256KiB"), ("chunk", "768KiB"), ("full", "")):
        found, times_s = [], []
        for seed in range(5):
            mode = "chunk" if order == "chunk" else "full"
            with mount(digits, mode, cache or "2MiB") as store:
                batches = stored(store) if order == "as stored" else Loader(store, 16, seed=seed)
                model, time_s = one_epoch(batches, -(-len(store) // 16), seed)
            found.append(accuracy(model, x[tested], y[tested]))
            times_s.append(time_s)
        shares = [f"{value:.1%}" for value in (statistics.fmean(found), min(found), max(found))]
        table.add_row(order, cache, *shares, format_seconds(statistics.median(times_s)))
    console.print(table)


def stored(store: Store) -> Iterator[dict[str, torch.Tensor]]:
    for begin in range(0, len(store), 16):
        fields = store.read_many(np.arange(begin, min(begin + 16, len(store)))).decoded()
        yield {name: torch.from_numpy(array.copy()) for name, array in fields.items()}


def one_epoch(batches: Iterable[dict[str, torch.Tensor]], steps: int, seed: int) -> tuple[nn.Module, float]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    began_s = time.perf_counter()
    for batch in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch["x"]), batch["y"].long()).backward()
        optimizer.step()
        falling.step()
    return model, time.perf_counter() - began_s


def accuracy(model: nn.Module, x: np.ndarray, y: np.ndarray) -> float:
    with torch.no_grad():
        return float((model(torch.from_numpy(x)).argmax(1) == torch.from_numpy(y)).float().mean())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
