"""Batches of a Loader lie in pinned memory, from where a GPU takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.samples import Loader, mount
from penstock.samples.decode import Sample
from tests.support.accelerator import wanted

pytest.importorskip("xxhash", reason="needs xxhash, to write stores")

from tests.support.stores import write_store

DEVICE = wanted("cuda")


def of_sample(sample: Sample) -> tuple[torch.Tensor, int]:
    return torch.tensor([sample.index, len(sample.data)]), sample.index


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("decode", [None, of_sample])
def test_batches_are_pinned_and_arrive(tmp_path: Path, threads: int, decode: object) -> None:
    contents = [bytes([i]) * (i * 10) for i in range(50)]
    write_store(tmp_path / "store", [(str(i), data) for i, data in enumerate(contents)])
    with mount(tmp_path / "store") as store:
        seen = []
        for batch in Loader(store, 8, decode=decode, num_threads=threads, pin_memory=True):
            tensors = list(batch.values()) if isinstance(batch, dict) else list(batch)
            assert all(tensor.is_pinned() for tensor in tensors)
            on_gpu = [tensor.to(DEVICE, non_blocking=True) for tensor in tensors]
            assert all(torch.equal(there.cpu(), here) for there, here in zip(on_gpu, tensors, strict=True))
            seen += batch["indices"].tolist() if isinstance(batch, dict) else batch[1].tolist()
        assert sorted(seen) == list(range(50))
