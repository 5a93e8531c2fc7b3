"""Mounts a store through a cache on a small disk of its own: run by `unshare --mount`, as root there.

    python -m tests.support.small_disk URL FOLDER

Prints as JSON what came of it: digests of two epochs, what was logged, and the error of a read-only disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys

from penstock import samples
from penstock.errors import SampleError

MOUNT = ("mount", "-t", "tmpfs", "-o")


def digest(store: samples.Store, epoch: int) -> str:
    found = hashlib.sha256()
    store.sequence(epoch=epoch)
    while (batch := store.bread(7)) is not None:
        found.update(batch.indices.tobytes() + batch.data.tobytes())
    return found.hexdigest()


def main(url: str, folder: str) -> None:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    found: dict[str, object] = {}
    subprocess.run([*MOUNT, "size=200k", "small", folder], check=True)
    for number in range(2):  # a second mount finds it full
        with samples.mount(url, cache_bytes="32KiB", cache_dir=folder) as store:
            found[f"full {number}"] = [digest(store, epoch) for epoch in range(2)]
            found[f"requests {number}"] = store.counters()["requests"]
    for size, options in (("full", "size=16k"), ("read-only", "ro")):
        subprocess.run([*MOUNT, options, "other", folder], check=True)
        try:
            samples.mount(url, cache_bytes="32KiB", cache_dir=folder)
        except SampleError as error:
            found[size] = str(error)
    print(json.dumps({**found, "logged": logged}))


if __name__ == "__main__":
    main(*sys.argv[1:])
