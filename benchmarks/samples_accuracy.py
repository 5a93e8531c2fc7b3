"""Does training from the chunk order give the accuracy of a full shuffle? DLFS, figure 13.

    python benchmarks/samples_accuracy.py -o out/samples_accuracy.json

scikit-learn's digits (1797 images of 8 x 8) are stored sorted by class, the worst order there is: most
chunks hold one class only. A small network is trained on three quarters of them, with several seeds (of its
weights and of the order), in these orders, and tested on the rest:

stored   as they lie, without a shuffle
chunk    penstock's, mixed in caches that hold a part of the store
full     penstock's permutation of all samples
torch    a permutation drawn by torch, samples held in memory: what everybody does

Mean and standard deviation over the seeds, and what mixing `penstock samples info` would tell.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import penstock
from penstock.samples import Batch, Store, expected_mixing, mount, pack
from penstock.samples.layout import buffer_bytes
from penstock.samples.order import cache_shape

CHUNK_BYTES = 4096
CLASSES = 10
SHARES = (0.05, 0.1, 0.25, 0.5)  # of the store's chunks, that the cache holds
BATCH = 32
EPOCHS = 10
LEARNING_RATE = 0.1  # falls to 0 in a line, as training usually does


@dataclass(frozen=True)
class Digits:
    """train: sorted by class. x: [n, 64] float32 in 0 to 1, y: [n] int64"""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Way:
    """cache_bytes: of the chunk order, 0 for others"""

    name: str
    order: str
    cache_bytes: int = 0


@dataclass(frozen=True)
class Result:
    """mixing: chunks of a batch against a full shuffle; accuracies: one for each seed"""

    name: str
    order: str
    cache_bytes: int
    slots: int
    mixing: float
    accuracies: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0


def digits() -> Digits:
    """The same split each time: every fourth image of a class is for testing."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    by_class = np.argsort(labels, kind="stable")
    x = torch.from_numpy((pixels[by_class] / 16).astype(np.float32))
    y = torch.from_numpy(labels[by_class].astype(np.int64))
    tested = torch.arange(len(y)) % 4 == 3
    return Digits(x[~tested], y[~tested], x[tested], y[tested])


def pack_digits(data: Digits, folder: Path) -> Path:
    """A store of the training images, in their order: sorted by class."""
    # As scikit-learn has them, in 64 bits: more chunks than there would be otherwise.
    arrays = {"x": data.train_x.double().numpy(), "y": data.train_y.numpy()}
    pack(arrays, folder, CHUNK_BYTES, format_options={"label_field": "y"})
    return folder


def ways(chunks: int, shares: Sequence[float] = SHARES) -> list[Way]:
    listed = [Way("stored", "stored")]
    for share in shares:
        cache_bytes = max(2, round(share * chunks)) * buffer_bytes(CHUNK_BYTES)
        listed.append(Way(f"chunk, {share:.0%} cached", "chunk", cache_bytes))
    return [*listed, Way("full", "full"), Way("torch", "torch")]


def batches(store: Store, way: Way, data: Digits, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch of x: [batch, 64] and y: [batch]."""
    if way.order == "torch":
        order = torch.randperm(len(store), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for chosen in order.split(BATCH):
            yield data.train_x[chosen], data.train_y[chosen]
        return
    if way.order == "stored":
        for begin in range(0, len(store), BATCH):
            yield tensors(store.read_many(np.arange(begin, min(begin + BATCH, len(store)))))
        return
    store.sequence(seed=seed, epoch=epoch)
    while (batch := store.bread(BATCH)) is not None:
        yield tensors(batch)


def tensors(batch: Batch) -> tuple[Tensor, Tensor]:
    fields = batch.decoded()
    return torch.from_numpy(fields["x"].astype(np.float32)), torch.from_numpy(fields["y"].copy())


def accuracy(folder: Path, way: Way, data: Digits, seed: int, epochs: int = EPOCHS) -> float:
    """Train once, and give the share of the test images that are named rightly."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    options = {"cache_bytes": way.cache_bytes} if way.cache_bytes else {}
    with mount(folder, "chunk" if way.order == "chunk" else "full", **options) as store:
        for epoch in range(epochs):
            for number, (x, y) in enumerate(batches(store, way, data, seed, epoch)):
                done = (epoch + number * BATCH / len(store)) / epochs
                optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - done)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    with torch.no_grad():
        return float((model(data.test_x).argmax(1) == data.test_y).float().mean())


def measure(folder: Path, way: Way, data: Digits, seeds: Sequence[int], epochs: int = EPOCHS) -> Result:
    with mount(folder, "full") as store:
        firsts = store.firsts
    slots = cache_shape(way.cache_bytes, CHUNK_BYTES, len(firsts) - 1).slots if way.cache_bytes else 0
    mixing = 1.0
    if way.order == "stored":
        chunks = np.searchsorted(firsts, np.arange(int(firsts[-1])), side="right")
        drawn = [len(set(chunks[at : at + BATCH].tolist())) for at in range(0, len(chunks) - BATCH, BATCH)]
        mixing = (
            statistics.fmean(drawn) / expected_mixing("full", firsts, slots=1, batch_size=BATCH).ideal_chunks
        )
    elif way.order == "chunk":
        mixing = expected_mixing("chunk", firsts, slots=slots, batch_size=BATCH).ratio
    accuracies = tuple(accuracy(folder, way, data, seed, epochs) for seed in seeds)
    return Result(way.name, way.order, way.cache_bytes, slots, mixing, accuracies)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="default: %(default)s")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: do not")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.epochs < 1:
        parser.error("--seeds and --epochs: give 1 or more")
    data = digits()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pack_digits(data, Path(scratch) / "store")
        with mount(folder, "full") as store:
            chunks = len(store.firsts) - 1
        print(
            f"{len(data.train_y)} images sorted by class in {chunks} chunks, {options.epochs} epochs,",
            end=" ",
        )
        print(f"batches of {BATCH}; {options.seeds} seeds\n")
        print(f"{'order':<20} {'chunks mixed':>12} {'mixing':>7} {'accuracy':>9} {'deviation':>9}")
        results = []
        for way in ways(chunks):
            result = measure(folder, way, data, range(options.seeds), options.epochs)
            results.append(result)
            print(
                f"{result.name:<20} {result.slots or '':>12} {result.mixing:>7.1%} {result.mean:>9.2%} "
                f"{result.deviation:>9.2%}",
                flush=True,
            )
    if options.output is not None:
        document = {
            "penstock": penstock.__version__,
            "torch": torch.__version__,
            "command": " ".join(sys.argv),
            "machine": {"system": platform.platform(), "cores": len(os.sched_getaffinity(0))},
            "date": time.strftime("%Y-%m-%d"),
            "chunks": chunks,
            "results": [
                {**asdict(result), "mean": result.mean, "deviation": result.deviation} for result in results
            ],
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(document, indent=1))
        print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
