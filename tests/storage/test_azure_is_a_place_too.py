"""az:// URLs, on the emulator of Azure's storage (make test-azure)."""

from __future__ import annotations

import base64
import errno
import hashlib
import hmac
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest
import torch

import penstock
from penstock import samples
from penstock.storage.objects import Bucket, ObjectError
from tests.support.object_servers import free_ports

ACCOUNT = "devstoreaccount1"
# The emulator's own, which everybody knows.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("obstore", reason="obstore is not installed: the extra cloud")
    if (binary := shutil.which("azurite-blob")) is None:
        pytest.skip("the emulator of Azure is not installed: make test-azure")
    (port,), data = free_ports(1), tmp_path_factory.mktemp("azurite")
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    with (data / "log").open("wb") as log:
        process = subprocess.Popen(
            [binary, "--blobPort", str(port), "--location", str(data), "--skipApiVersionCheck"]
            + ["--disableTelemetry"],
            stdout=log,
            stderr=log,
        )
    try:
        for _ in range(300):
            try:
                _make_container(endpoint, "penstock")
                break
            except OSError:
                time.sleep(0.1)
        yield endpoint
    finally:
        process.kill()
        process.wait()


def _make_container(endpoint: str, name: str) -> None:
    """What obstore has no call for."""
    date, version = formatdate(usegmt=True), "2021-08-06"
    wanted = f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n"
    wanted += f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signed = hmac.new(base64.b64decode(KEY), wanted.encode(), hashlib.sha256).digest()
    headers = {"x-ms-date": date, "x-ms-version": version, "Content-Length": "0"}
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}"
    request = urllib.request.Request(f"{endpoint}/{name}?restype=container", method="PUT", headers=headers)
    urllib.request.urlopen(request, timeout=10).close()


@pytest.fixture(autouse=True)
def azure(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)


def test_objects_are_written_listed_and_read_by_ranges() -> None:
    bucket = Bucket("az://penstock/objects")
    written = bucket.write("a/b", (bytes([i]) * 5_000_000 for i in range(4)), size_bytes=20_000_000)
    assert bucket.listed() == {"a/b": bucket.info("a/b")} == {"a/b": written}
    assert bytes(bucket.read("a/b", 4_999_999, 5_000_001, written.tag)) == b"\0\1"
    bucket.write("a/b", b"other")
    with pytest.raises(ObjectError) as caught:
        bucket.read("a/b", 0, 2, written.tag)
    assert caught.value.errno == errno.ESTALE
    bucket.delete(["a/b", "is not there"])
    assert not bucket.listed()


def test_errors_name_the_object_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ObjectError, match="az://penstock/none/gone cannot be read") as caught:
        Bucket("az://penstock/none").read("gone")
    assert caught.value.errno == errno.ENOENT
    wrong = base64.b64encode(b"wrong" * 10).decode()
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", wrong)
    with pytest.raises(ObjectError) as caught:
        Bucket("az://penstock/none").read("gone")
    assert caught.value.errno == errno.EACCES
    assert wrong not in str(caught.value) and KEY not in str(caught.value)


def test_checkpoints_and_increments_lie_there(tmp_path: Path) -> None:
    state = {"a": torch.randn(3_000_000), "b": torch.randn(10)}
    with penstock.checkpoint.Manager("az://penstock/run", keep_last=2) as manager:
        for step in range(3):
            manager.save({**state, "step": step}, step)
        manager.wait()
        latest = manager.latest()
    loaded = penstock.load(str(latest))
    assert loaded["step"] == 2 and all(torch.equal(loaded[name], state[name]) for name in state)
    assert [each.step for each in penstock.checkpoint.ls("az://penstock/run")] == [0, 1, 2]
    penstock.checkpoint.convert(str(latest), tmp_path / "packed.safetensors")
    assert torch.equal(penstock.load(tmp_path / "packed.safetensors")["a"], state["a"])


def test_a_store_is_uploaded_and_mounted(tmp_path: Path) -> None:
    content = {f"s{i:03d}": bytes([i]) * (i + 1) for i in range(200)}
    samples.pack(list(content.items()), tmp_path / "store")
    samples.upload(tmp_path / "store", "az://penstock/store")
    with samples.mount("az://penstock/store", cache_dir=tmp_path / "cache", cache_disk="10MiB") as store:
        batch = store.read_many(range(len(store)))
        assert dict(zip(batch.names(), map(bytes, batch), strict=True)) == content
