"""The keys of an object store are in nothing that a run leaves: objects, caches, reports, logs."""

from __future__ import annotations

import gc
import logging
import pickle
import time
import traceback
from pathlib import Path

import pytest
import torch

import penstock
from penstock import checkpoint, report, samples
from penstock.errors import PenstockError
from penstock.storage.objects import Bucket
from tests.support.object_servers import ACCESS_KEY, S3, SECRET_KEY
from tests.support.runs import HARDWARE, PAGED
from tests.support.sample_stores import epoch, some_samples
from tests.support.stores import write_store

pytest.importorskip("obstore", reason="obstore is not installed: the extra cloud")

WRONG = ("AKIAREFUSED", "a-secret-that-is-refused")


def test_keys_are_in_nothing_that_is_left(
    s3: S3,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    write_store(tmp_path / "packed", some_samples(60))
    url, run_url = s3.url("keys/store"), s3.url("keys/run")
    samples.upload(tmp_path / "packed", url)
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(4)))
    there, said = Bucket(s3.url("keys")), list[str]()
    with penstock.offload(
        model, device_budget="1MiB", spill_dir=tmp_path, hardware=HARDWARE, planning=PAGED
    ) as run:
        with checkpoint.Manager(run_url) as manager:
            for step in range(2):
                with run.step():
                    model(torch.ones(1, 100)).sum().backward()
                    model.zero_grad()
                manager.save({"model": model.state_dict()}, step)
        store = samples.mount(url, cache_bytes="64KiB", cache_dir=tmp_path / "cache")
        epoch(store)
        said += map(repr, (run.report(), store, manager, samples.Loader(store, 4)))
        report.Record.of(run).save(tmp_path / "record")
    (tmp_path / "pickle").write_bytes(pickle.dumps((store, samples.Loader(store, 4))))
    store.close()

    def fail() -> None:
        for call in (
            lambda: samples.mount(url, timeout_s=1),
            lambda: samples.upload(tmp_path / "packed", s3.url("keys/refused"), timeout_s=1),
            lambda: checkpoint.load(manager.latest() or ""),
            lambda: checkpoint.ls(run_url),
        ):
            with pytest.raises(PenstockError) as caught:
                call()
            said.extend(traceback.format_exception(caught.value))
        handle = checkpoint.save({"step": 1}, f"{run_url}/refused", wait=False)
        while not handle.done():
            time.sleep(0.01)
        del handle
        gc.collect()  # nobody has asked for its error, which is logged with its traceback

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", WRONG[0])
    fail()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", WRONG[1])
    fail()
    assert any("refused" in record.getMessage() for record in caplog.records)
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("penstock-samples" in path.parts for path in kept)
    left = [path.read_bytes() for path in kept]
    left += [name.encode() + bytes(there.read(name)) for name in there.listed()]
    left += [text.encode() for text in (*said, caplog.text, *capfd.readouterr())]
    assert len(left) > 20
    for secret in (ACCESS_KEY, SECRET_KEY, *WRONG):
        assert not [data for data in left if secret.encode() in data], secret
