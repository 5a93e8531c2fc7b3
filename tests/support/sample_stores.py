"""Stores for tests: written by tests/support/stores.py, or of samples that hypothesis thinks of."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from penstock.samples import Loader
from penstock.samples import store as stores
from tests.support.stores import write_store

Sample = tuple[str, bytes]

# Text of any kind, also bytes of a file name that are no UTF-8, as Python shows them.
names = st.text(
    st.characters(exclude_categories=["Cs"]) | st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF),
    max_size=12,
).filter(lambda name: name.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape") == name)


@st.composite
def samples(draw: st.DrawFn, most: int = 60) -> list[Sample]:
    """Samples of sizes from nothing to several chunks of 4096 bytes."""
    sizes = st.sampled_from([0, 1, 7, 300, 1023, 1024, 1025, 4095, 4096, 4097, 9000, 20000])
    named = draw(st.lists(names, max_size=most, unique=True))
    content = random.Random(len(named))
    return [(name, content.randbytes(draw(sizes))) for name in named]


def some_samples(count: int = 100, seed: int = 0) -> list[Sample]:
    """Samples of up to 5000 bytes, the same each time."""
    content = random.Random(seed)
    return [
        (f"{seed}/{index}", content.randbytes(content.choice([0, 9, 100, 900, 1500, 5000])))
        for index in range(count)
    ]


def mounted(folder: Path, content: Sequence[Sample], **options: Any) -> stores.Store:
    """Write a store in two or more data files, and mount it with a small cache."""
    write_store(folder, content, data_file_bytes=70_000)
    return stores.mount(folder, **{"cache_bytes": "64KiB", **options})


def epoch(store: stores.Store, n: int = 7) -> dict[int, bytes]:
    """What bread gives until the end, by index. Every batch is checked, and no sample comes twice."""
    found: dict[int, bytes] = {}
    while (batch := store.bread(n)) is not None:
        assert len(batch) == len(batch.indices) == len(batch.offsets) - 1 <= n
        for place, index in enumerate(batch.indices.tolist()):
            assert index not in found
            found[index] = bytes(batch[place])
    assert store.bread(n) is None
    return found


def received(loader: Loader, batches: int | None = None) -> list[list[int]]:
    """The indices of its batches, where it decodes them to that: so many batches, or all."""
    return list(loader) if batches is None else list(itertools.islice(loader, batches))


def flat(batches: Sequence[Sequence[int]]) -> list[int]:
    return [index for batch in batches for index in batch]
