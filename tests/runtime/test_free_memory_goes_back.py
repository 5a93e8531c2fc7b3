"""What is free goes back to the system from the heap of the thread that asks, too, whatever its end holds."""

from __future__ import annotations

import subprocess
import sys

import pytest

# glibc has seen large blocks come and go, as in any training, and so keeps up to 60 MiB of a heap's end.
# Each thread has a heap of its own while the others live.
HEAPS = """
import ctypes, sys, threading
from penstock.runtime import resident

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
libc.memset.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
libc.free(libc.malloc(30 << 20))
together = threading.Barrier(4)

def use():
    blocks = [libc.malloc(60_000) for _ in range(300)]
    for block in blocks:
        libc.memset(block, 1, 60_000)
    for block in blocks:
        libc.free(block)
    together.wait()
    together.wait()
    resident.release_free_memory()
    together.wait()

before_bytes = resident._status_bytes("RssAnon")
threads = [threading.Thread(target=use) for _ in range(3)]
for thread in threads:
    thread.start()
together.wait()
held_bytes = resident._status_bytes("RssAnon") - before_bytes
together.wait()
together.wait()
print(held_bytes, resident._status_bytes("RssAnon") - before_bytes)
"""


def test_what_a_threads_heap_holds_free_goes_back() -> None:
    ended = subprocess.run([sys.executable, "-c", HEAPS], capture_output=True, text=True, check=True)
    held_bytes, left_bytes = map(int, ended.stdout.split())
    if held_bytes < 30 << 20:
        pytest.skip("this C library keeps nothing that is free")
    assert left_bytes < 2 << 20
