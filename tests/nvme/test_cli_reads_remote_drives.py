"""`penstock samples` takes the URL of a namespace wherever it takes a store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import cli
from tests.support.nvme_target.process import NQN, Namespace, Subsystem, Target
from tests.support.remote_stores import MIB, image_of, serving, url_of
from tests.support.sample_stores import some_samples
from tests.support.stores import write_store

SAMPLES = some_samples(80)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "store"
    write_store(folder, SAMPLES, data_file_bytes=70_000, labels=[0] * len(SAMPLES), classes=["all"])
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with serving(tmp_path, subsystems=2) as target:
        yield target


def told(capsys: pytest.CaptureFixture[str], *arguments: object, exit_code: int = 0) -> str:
    assert cli.main(["samples", *map(str, arguments)]) == exit_code
    shown = capsys.readouterr()
    assert (shown.err == "") == (exit_code == 0)
    return shown.out if exit_code == 0 else shown.err


def values(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    return json.loads(told(capsys, *arguments, "--json"))


def test_a_store_goes_there_and_back(
    store: Path, target: Target, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = url_of(target)
    said = told(capsys, "upload", store, url)
    assert said.startswith(f"{len(SAMPLES)} samples, ")
    assert said.endswith(f"wrote {url}\n")
    assert "were there already" in told(capsys, "upload", store, url)
    uploaded = values(capsys, "upload", store, url, "--overwrite")
    assert uploaded["written"] == [url]
    assert uploaded["written_bytes"] == uploaded["size_bytes"]
    for command in (["ls", "--long"], ["ls", "0/1*"], ["info"], ["verify"]):
        name, *options = command
        remote, local = (told(capsys, name, place, *options) for place in (url, store))
        assert remote.replace(url, "") == local.replace(str(store), "")
    assert told(capsys, "unpack", url, tmp_path / "out", SAMPLES[3][0]).startswith("1 samples")
    assert (tmp_path / "out" / SAMPLES[3][0]).read_bytes() == SAMPLES[3][1]
    measured = values(capsys, "bench", url, "--time-limit", "0.2", "--cache", "64KiB")
    assert [row["cached"] for row in measured["rows"]] == [None] * 4
    assert all(row["samples"] > 0 for row in measured["rows"])


def test_what_a_target_has_is_listed(
    store: Path, target: Target, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    portal = f"{target.address}:{target.port}"
    told(capsys, "upload", store, url_of(target))
    with open(image_of(tmp_path, 1), "r+b") as image:
        image.seek(1080)
        image.write(b"\x53\xef")
    found = {each["url"]: each for each in values(capsys, "discover", portal)["namespaces"]}
    assert found[url_of(target)] == {
        "url": url_of(target),
        "size_bytes": 32 * MIB,
        "block_bytes": 512,
        "holds": "a store",
        "problem": "",
    }
    assert found[url_of(target, 1)]["holds"] == "an ext2, ext3 or ext4 file system"
    shown = told(capsys, "discover", f"nvme+tcp://{portal}")
    assert f"{url_of(target)}   32.00 MiB   512 B" in shown
    for secure in (0, 1):
        target.set(secure=secure)
        (each, *_) = values(capsys, "discover", portal)["namespaces"]
        assert ("TLS" in each["problem"]) == bool(secure)


def test_what_is_refused_says_why(
    store: Path, target: Target, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = url_of(target)
    told(capsys, "upload", store, url)
    write_store(tmp_path / "other", SAMPLES[:9])
    for says, *arguments in (
        ("holds another store: nothing was written", "upload", tmp_path / "other", url),
        ("is on another machine already", "upload", url, url_of(target, 1)),
        ("no sample store: it is empty", "info", url_of(target, 1)),
        ("asks for TLS", "ls", url.replace("tcp", "tls")),
        ("queues=x: it is a number", "verify", url + "&queues=x"),
        ("no page cache is before it here", "bench", url, "--cold"),
        ("names no namespace", "upload", store, url.partition("?")[0]),
        ("Nothing listens there", "discover", "127.0.0.1:1"),
        ("neither a name nor an address", "discover", "a b"),
        ("for a namespace upload the packed store then", "pack", store, url),
    ):
        assert says in told(capsys, *arguments, exit_code=1), arguments
    assert not Path("nvme+tcp:").exists()


def test_two_namespaces_of_a_subsystem_hold_two_stores(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_store(tmp_path / "other", SAMPLES[:9])
    namespaces = [Namespace(number, 32 * MIB, 4096) for number in (1, 5)]
    with Target([Subsystem(NQN.format(0), namespaces)]) as target:
        for number, folder in ((1, store), (5, tmp_path / "other")):
            told(capsys, "upload", folder, url_of(target, namespace=number))
        for number, samples in ((1, SAMPLES), (5, SAMPLES[:9])):
            names = told(capsys, "ls", url_of(target, namespace=number)).splitlines()
            assert names == [name for name, _ in samples]
