"""gs:// URLs, on a server that speaks enough of the XML interface of Google Cloud Storage (SeaweedFS)."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import penstock
from penstock import samples
from penstock.storage.objects import Bucket, ObjectError
from tests.support.object_servers import BUCKET, open_seaweed

pytest.importorskip("obstore", reason="obstore is not installed: the extra cloud")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with open_seaweed(tmp_path_factory.mktemp("google")) as endpoint:
        yield endpoint


@pytest.fixture
def url(endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
    return f"gs://{BUCKET}/{request.node.name}"


def test_objects_come_back_as_written(url: str) -> None:
    bucket, large = Bucket(url), bytes(range(256)) * (20 << 12)
    bucket.write("a/small", b"small")
    bucket.write("large", (large[at : at + (8 << 20)] for at in range(0, len(large), 8 << 20)))
    assert set(bucket.listed()) == {"a/small", "large"} and bucket.folders() == ["a"]
    assert bucket.info("large").size_bytes == len(large) == 20 << 20
    assert bytes(bucket.read("large", 5, 900)) == large[5:900]
    bucket.delete(["a/small", "large"])
    with pytest.raises(ObjectError) as caught:
        bucket.read("large")
    assert caught.value.errno == errno.ENOENT and "large cannot be read" in str(caught.value)


def test_stores_and_checkpoints_lie_there(url: str, tmp_path: Path) -> None:
    content = [(f"{n}", bytes([n]) * 700) for n in range(100)]
    samples.pack(content, tmp_path / "packed", 4096)
    samples.upload(tmp_path / "packed", url)
    with samples.mount(url, cache_dir=tmp_path / "cache") as store:
        assert [bytes(each) for each in store.read_many(range(100))] == [data for _, data in content]
    state = {"weights": torch.randn(1000), "step": 3}
    penstock.save(state, f"{url}/one.safetensors")
    found = penstock.load(f"{url}/one.safetensors")
    assert found["step"] == 3 and torch.equal(found["weights"], state["weights"])
