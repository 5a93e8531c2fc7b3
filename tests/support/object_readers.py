"""Processes that read a store from an object store, through one cache."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

from penstock import samples

Batches = list[tuple[list[int], bytes]]


def bits(store: samples.Store, **sequence: Any) -> Batches:
    """The batches of an epoch."""
    store.sequence(**sequence)
    found = []
    while (batch := store.bread(7)) is not None:
        found.append((batch.indices.tolist(), batch.data.tobytes()))
    return found


def read(url: str, cache: Path, seed: int, together: Any, queue: Any) -> None:
    """An epoch, once all have mounted; then put it into the queue, and how many requests it took."""
    with samples.mount(url, cache_bytes="32KiB", cache_dir=cache) as store:
        together.wait(60)
        queue.put((seed, bits(store, seed=seed), store.counters()["requests"]))


def read_for_ever(url: str, cache: Path, queue: Any) -> None:
    with samples.mount(url, cache_bytes="32KiB", cache_dir=cache) as store:
        queue.put("mounted")
        while (parent := multiprocessing.parent_process()) is not None and parent.is_alive():
            bits(store)
