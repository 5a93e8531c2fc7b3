"""Two training processes are killed; three go on from their last checkpoint: nothing twice, nothing lost."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.samples import Loader, Mixture, filtered, merge_states, mount, packed
from tests.support.apart import Program, Running
from tests.support.stores import write_store

TOKENS, IMAGES = 300, 200
EVERY = 3  # batches between checkpoints


def make_source(folder: Path, rank: int, world_size: int) -> Mixture:
    """Blocks of a store of tokens, and every other sample of a store of bytes, each once an epoch."""
    tokens, images = (
        mount(folder / name, cache_bytes="64KiB", rank=rank, world_size=world_size)
        for name in ("tokens", "images")
    )
    blocks, some = packed(tokens, 128, tokens="uint16"), filtered(images, range(0, IMAGES, 2))
    return Mixture({blocks: len(blocks), some: len(some)})


def train(folder: Path, rank: int, world_size: int, states: list[dict[str, Any]]) -> None:
    """As a training process does: a checkpoint every few batches, of its state and what it has trained on."""
    loader = Loader(
        make_source(folder, rank, world_size),
        4,
        decode_batch=lambda batch: batch.indices.tolist(),
        num_threads=1,
    )
    if states:
        loader.load_state_dict(merge_states(states))
    seen: list[int] = []
    for step, batch in enumerate(loader, 1):
        seen += batch
        if not states:
            time.sleep(0.02)
        if step % EVERY == 0:
            save(folder / f"checkpoint-{step}-{rank}", {"seen": seen, "state": loader.state_dict()})
    if not states:
        signal.pause()  # the other may have begun later: until both are killed
    save(folder / f"end-{world_size}-{rank}", {"seen": seen})


def save(path: Path, value: Any) -> None:
    path.with_suffix(".next").write_text(json.dumps(value))
    os.replace(path.with_suffix(".next"), path)


def start(folder: Path, rank: int, world_size: int, states: list[dict[str, Any]]) -> Running:
    code = (
        "import json, sys; from pathlib import Path; "
        "from tests.samples.test_killed_processes_resume_with_others import train; "
        "train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))"
    )
    return Running(Program(code, (folder, rank, world_size, json.dumps(states))))


def last_checkpoint(folder: Path) -> int:
    """The last step that both processes have saved; 0: none."""
    for step in itertools.count(EVERY, EVERY):
        if not all((folder / f"checkpoint-{step}-{rank}").exists() for rank in range(2)):
            return step - EVERY
    raise AssertionError


@pytest.mark.parametrize("after", [EVERY, pytest.param(4 * EVERY, marks=pytest.mark.slow)])
def test_killed_with_two_resumed_with_three(tmp_path: Path, after: int) -> None:
    rng = np.random.default_rng(after)
    lengths = rng.integers(1, 100, TOKENS)
    write_store(tmp_path / "tokens", [(str(i), bytes(2 * int(length))) for i, length in enumerate(lengths)])
    write_store(tmp_path / "images", [(str(i), rng.bytes(500)) for i in range(IMAGES)])

    running = [start(tmp_path, rank, 2, []) for rank in range(2)]
    while last_checkpoint(tmp_path) < after:
        assert all(each.process.exitcode is None for each in running), [each.said for each in running]
        time.sleep(0.01)
    assert [each.end(0).returncode for each in running] == [-signal.SIGKILL] * 2

    step = last_checkpoint(tmp_path)
    saved = [json.loads((tmp_path / f"checkpoint-{step}-{rank}").read_text()) for rank in range(2)]
    seen = [index for each in saved for index in each["seen"]]
    source = make_source(tmp_path, 0, 1)
    assert 0 < len(seen) < len(source)

    resumed = [start(tmp_path, rank, 3, [each["state"] for each in saved]) for rank in range(3)]
    assert [each.end().returncode for each in resumed] == [0, 0, 0]
    for rank in range(3):
        seen += json.loads((tmp_path / f"end-3-{rank}").read_text())["seen"]
    blocks, images = (source.sources[i].indices_end for i in range(2))
    assert sorted(seen) == [*range(blocks), *range(blocks, blocks + images, 2)]
