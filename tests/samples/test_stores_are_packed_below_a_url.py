"""A store that is packed below a URL is the one that a folder has, and leaves nothing on this machine."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock import cli, samples
from penstock.errors import InvalidArgument, SampleError
from penstock.samples import progress
from penstock.samples.objects.packing import Sending, staging_path
from penstock.samples.sources import Source
from penstock.storage.objects import Bucket
from tests.support.apart import Program, Running, python
from tests.support.object_readers import bits
from tests.support.object_servers import S3, Proxy, writes
from tests.support.packing import Listed, Stopped, contents, pack_often, samples_of

pytest.importorskip("obstore", reason="obstore is not installed: the extra cloud")

ITEMS = samples_of(60, 1500)
DATA_FILE_BYTES = 12_000


@pytest.fixture
def url(s3: S3, request: pytest.FixtureRequest) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return s3.url(f"packed/{name}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same store, packed to a folder."""
    pack_often(Listed(ITEMS), tmp_path / "store", DATA_FILE_BYTES)
    return tmp_path / "store"


def objects(url: str) -> dict[str, Any]:
    """What `contents` gives of a folder."""
    bucket = Bucket(url)
    found: dict[str, Any] = {name: bytes(bucket.read(name)) for name in bucket.listed()}
    found["store.json"] = json.loads(found["store.json"])
    return found


def pack_below(url: str, staging: Path, source: Source | None = None, **options: Any) -> None:
    """Pack with checkpoints at every sample: each data file is sent as soon as it is whole."""
    source = Listed(ITEMS) if source is None else source
    with Sending(Bucket(url, 6), removes_folder=False) as sending:
        pack_often(source, staging, DATA_FILE_BYTES, sending=sending, **options)


def test_the_objects_are_the_files_of_a_folder(url: str, folder: Path, tmp_path: Path) -> None:
    most = 0

    def look(count: int, size_bytes: int) -> None:
        nonlocal most
        most = max(most, sum(path.name.startswith("data-") for path in (tmp_path / "staging").iterdir()))

    pack_below(url, tmp_path / "staging", report=look)
    assert objects(url) == contents(folder)
    assert sum(name.startswith("data-") for name in objects(url)) > 6 and most <= 5
    assert list((tmp_path / "staging").iterdir()) == []
    with samples.mount(url) as store, samples.mount(folder) as here:
        assert bits(store) == bits(here)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_public_function_packs_too(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for rank in range(world_size):
        options: dict[str, Any] = {"chunk_bytes": 4096, "rank": rank, "world_size": world_size}
        made = samples.pack(ITEMS, url, data_file_bytes=DATA_FILE_BYTES, **options)
        assert made == samples.pack(ITEMS, tmp_path / "here", data_file_bytes=DATA_FILE_BYTES, **options)
        if rank + 1 < world_size:
            with pytest.raises(SampleError, match="part-00001-of-00002"):
                samples.mount(url)
    assert list((tmp_path / "tmp").iterdir()) == []
    with samples.mount(url) as store, samples.mount(tmp_path / "here") as here:
        assert bits(store) == bits(here) and len(store) == len(ITEMS)
    with pytest.raises((SampleError, InvalidArgument), match=r"already a store|not a partition"):
        samples.pack(ITEMS, url, rank=0, world_size=world_size if world_size == 1 else 3)


@pytest.mark.parametrize("stop", [5, 31, 60])
@pytest.mark.parametrize("error", [Stopped, KeyboardInterrupt])
def test_an_interrupted_packing_goes_on(
    url: str, proxy: Proxy, folder: Path, tmp_path: Path, stop: int, error: type[BaseException]
) -> None:
    staging = tmp_path / "staging"
    with pytest.raises(error):
        pack_below(url, staging, Listed(ITEMS, stop=stop, error=error))
    with pytest.raises(SampleError, match="no sample store"):
        samples.mount(url)
    found = progress.read(staging)
    assert found is not None and found.samples == stop
    sent = [line for line, _ in proxy.requests if writes(line) and "/data-" in line]
    pack_below(url, staging)
    assert objects(url) == contents(folder)
    again = [line for line, _ in proxy.requests if writes(line) and "/data-" in line][len(sent) :]
    assert len({*sent, *again}) == len(sent) + len(again) - len({*sent} & {*again})
    assert len({*sent} & {*again}) <= 3  # that were sent, and no checkpoint said so yet


def pack_until_killed(url: str, staging: str, at: str) -> None:
    """Be killed at the sample of this number."""

    def report(count: int, size_bytes: int) -> None:
        if count >= int(at):
            os.kill(os.getpid(), signal.SIGKILL)

    pack_below(url, Path(staging), report=report)


def test_a_killed_packing_goes_on(url: str, folder: Path, tmp_path: Path) -> None:
    code = f"import sys; from {__name__} import *; pack_until_killed(*sys.argv[1:])"
    for at in (9, 20, 44, 60):
        assert python(code, url, tmp_path / "staging", at).returncode == -signal.SIGKILL
        with pytest.raises(SampleError, match="no sample store"):
            samples.mount(url)
    pack_below(url, tmp_path / "staging")
    assert objects(url) == contents(folder)


def test_a_server_in_trouble_is_one_error_and_packing_goes_on(
    url: str, proxy: Proxy, folder: Path, tmp_path: Path
) -> None:
    for gone in ("data-00002.bin", "names.bin", "store.json"):
        proxy.answer = lambda line, number, gone=gone: 503 if writes(line) and gone in line else None
        with pytest.raises(SampleError, match=rf"{gone} cannot be written: .*503.*goes on where it stopped"):
            pack_below(url, tmp_path / "staging")
        proxy.answer = lambda line, number: None
        with pytest.raises(SampleError, match="no sample store"):
            samples.mount(url)
    pack_below(url, tmp_path / "staging")
    assert objects(url) == contents(folder)


def test_what_is_not_ours_stays(url: str, folder: Path, tmp_path: Path) -> None:
    bucket = Bucket(url)
    bucket.write("mine.txt", b"mine")
    with pytest.raises(Stopped):
        pack_below(url, tmp_path / "staging", Listed(ITEMS, stop=40))
    there = bucket.listed()
    refused = r"somebody else packs or uploads to .*: nothing was written.*overwrite=True"
    with pytest.raises(SampleError, match=refused):
        samples.pack(ITEMS[:10], url, staging=tmp_path / "another")
    with pytest.raises(SampleError, match=refused):
        samples.upload(folder, url)
    assert bucket.listed() == there
    samples.pack(ITEMS[:10], url, staging=tmp_path / "another", overwrite=True)
    assert bytes(bucket.read("mine.txt")) == b"mine"
    with samples.mount(url) as store:
        assert len(store) == 10
    with pytest.raises(SampleError, match="is already a store: nothing was written"):
        samples.pack(ITEMS[:10], url, staging=tmp_path / "another")
    samples.pack(ITEMS[:20], url, staging=tmp_path / "a third", overwrite=True)
    with samples.mount(url) as store:
        assert len(store) == 20


def test_objects_that_vanish_meanwhile_are_missed(url: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        pack_below(url, tmp_path / "staging", Listed(ITEMS, stop=50))
    Bucket(url).delete(["data-00000.bin"])
    there = Bucket(url).listed()
    with pytest.raises(SampleError, match=r"data-00000.bin, which was sent, is not there.*resume=False"):
        pack_below(url, tmp_path / "staging")
    assert Bucket(url).listed() == there
    with pytest.raises(SampleError, match="no sample store"):
        samples.mount(url)
    pack_below(url, tmp_path / "staging", resume=False)
    assert objects(url) == contents(folder)


def test_what_is_refused_has_changed_nothing(url: str, tmp_path: Path) -> None:
    samples.pack(ITEMS, url, staging=tmp_path / "staging")
    there = Bucket(url).listed()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.txt").touch()
    with pytest.raises(InvalidArgument, match=r"holds 'mine.txt', which packing did not write"):
        samples.pack(ITEMS[:5], url, staging=tmp_path / "mine", overwrite=True)
    with pytest.raises(Stopped):
        pack_often(Listed(ITEMS, stop=9), tmp_path / "begun", DATA_FILE_BYTES)
    with pytest.raises(SampleError, match="was begun with"):
        samples.pack(ITEMS[:5], url, staging=tmp_path / "begun", overwrite=True)
    assert Bucket(url).listed() == there


def test_another_process_is_refused_and_harms_nothing(url: str, folder: Path, tmp_path: Path) -> None:
    def look(count: int, size_bytes: int) -> None:
        if 20 < count < 40:
            with pytest.raises(SampleError, match="another process is packing into"):
                pack_below(url, tmp_path / "staging", resume=False)

    pack_below(url, tmp_path / "staging", report=look)
    assert objects(url) == contents(folder)


@pytest.mark.parametrize("empty", range(40, 48))
def test_a_data_file_that_is_not_full_is_not_sent(url: str, tmp_path: Path, empty: int) -> None:
    """Samples of no bytes come first where packing goes on."""
    items = [(name, b"" if empty <= n < empty + 3 else data) for n, (name, data) in enumerate(ITEMS)]
    with pytest.raises(Stopped):
        pack_below(url, tmp_path / "staging", Listed(items, stop=empty))
    pack_below(url, tmp_path / "staging", Listed(items))
    pack_often(Listed(items), tmp_path / "here", DATA_FILE_BYTES)
    assert objects(url) == contents(tmp_path / "here")


def test_packing_is_known_by_what_waits_and_not_by_where(url: str, folder: Path, tmp_path: Path) -> None:
    """Of two containers, both may call their folder the same; one that starts again may have another name."""
    staging = tmp_path / "staging"
    with pytest.raises(Stopped):
        pack_below(url, staging, Listed(ITEMS, stop=50))
    there = Bucket(url).listed()
    staging.rename(tmp_path / "volume")
    with pytest.raises(SampleError, match="somebody else packs or uploads to"):
        pack_below(url, staging)
    assert Bucket(url).listed() == there
    with (
        Sending(Bucket(url), overwrite=True) as sending,
        pytest.raises(Stopped),
    ):
        pack_often(Listed(ITEMS, stop=1), staging, DATA_FILE_BYTES, sending=sending)
    assert list(Bucket(url).listed()) == ["penstock-upload"]
    with (
        Sending(Bucket(url), overwrite=True) as sending,
        pytest.raises(SampleError, match=r"was sent, is not there any more.*resume=False"),
    ):
        pack_often(Listed(ITEMS), tmp_path / "volume", DATA_FILE_BYTES, sending=sending)
    pack_below(url, staging)
    assert objects(url) == contents(folder)


@pytest.mark.parametrize("lost", [True, False])
def test_a_packing_that_is_killed_at_its_first_request_goes_on(
    url: str, proxy: Proxy, folder: Path, tmp_path: Path, lost: bool
) -> None:
    began = threading.Event()

    def kill(line: str, number: int) -> str | None:
        if not writes(line):
            return None
        began.wait()
        child.process.kill()
        return "lost" if lost else "drop"

    proxy.answer = kill
    code = f"from {__name__} import *; pack_below({url!r}, Path({str(tmp_path / 'staging')!r}))"
    child = Running(Program(code))
    began.set()
    assert child.end().returncode == -signal.SIGKILL
    proxy.answer = lambda line, number: None
    assert list(Bucket(url).listed()) == (["penstock-upload"] if lost else [])
    pack_below(url, tmp_path / "staging")
    assert objects(url) == contents(folder)


def once(when: Callable[[str], bool], then: Callable[[], object]) -> Callable[[str, int], None]:
    """For `Proxy.answer`: what happens before the first request that is such a one is passed on."""
    left = [then]

    def answer(line: str, number: int) -> None:
        if left and when(line):
            left.pop()()

    return answer


OTHERS = samples_of(25, 900)


def pack_others(url: str, staging: Path, stop: int | None, overwrite: bool = False) -> None:
    """Another writer's, which may be stopped."""
    with Sending(Bucket(url), overwrite=overwrite) as sending, contextlib.suppress(Stopped):
        pack_often(Listed(OTHERS, stop=stop), staging, DATA_FILE_BYTES, sending=sending)


@pytest.mark.parametrize("stop", [None, 1, 20])
def test_one_of_two_that_begin_at_once_is_refused(
    url: str, proxy: Proxy, tmp_path: Path, stop: int | None
) -> None:
    others = tmp_path / "others"
    proxy.answer = once(lambda line: bool(writes(line)), lambda: pack_others(url, others, stop))
    with pytest.raises(SampleError, match="somebody else has begun to write to"):
        pack_below(url, tmp_path / "staging")
    pack_often(Listed(OTHERS), tmp_path / "here", DATA_FILE_BYTES)
    if stop is not None:
        pack_others(url, others, None)
    assert objects(url) == contents(tmp_path / "here")


@pytest.mark.parametrize("stop", [None, 20])
def test_who_was_taken_over_writes_nothing_more(
    url: str, proxy: Proxy, tmp_path: Path, stop: int | None
) -> None:
    others, asked = tmp_path / "others", itertools.count()
    proxy.answer = once(
        lambda line: line.startswith("GET") and "penstock-upload" in line and next(asked) == 4,
        lambda: pack_others(url, others, stop, overwrite=True),
    )
    with pytest.raises(SampleError, match="somebody else has begun to write to"):
        pack_below(url, tmp_path / "staging")
    pack_often(Listed(OTHERS), tmp_path / "here", DATA_FILE_BYTES)
    if stop is not None:
        with pytest.raises(SampleError, match="somebody else packs or uploads to"):
            pack_below(url, tmp_path / "staging")
        pack_others(url, others, None)
    assert objects(url) == contents(tmp_path / "here")


@pytest.mark.parametrize("uploads", [False, True])
def test_who_is_taken_over_while_a_large_file_is_sent_leaves_nothing_of_it(
    url: str, proxy: Proxy, tmp_path: Path, uploads: bool
) -> None:
    items = [(str(number), bytes([number]) * (6 << 20)) for number in range(4)]
    samples.pack(items, tmp_path / "here", data_file_bytes="12MiB")
    proxy.answer = once(
        lambda line: writes(line) == "begin",
        lambda: pack_others(url, tmp_path / "others", None, overwrite=True),
    )
    with pytest.raises(SampleError, match="somebody else has begun to write to"):
        if uploads:
            samples.upload(tmp_path / "here", url)
        else:
            samples.pack(items, url, data_file_bytes="12MiB", staging=tmp_path / "staging")
    assert not any(writes(line) == "end" for line, _ in proxy.requests)
    pack_often(Listed(OTHERS), tmp_path / "others here", DATA_FILE_BYTES)
    assert objects(url) == contents(tmp_path / "others here")


def test_an_upload_refuses_who_has_only_begun(url: str, folder: Path) -> None:
    bucket = Bucket(url)
    bucket.write("penstock-upload", b"somebody")
    with pytest.raises(SampleError, match="somebody else packs or uploads to"):
        samples.upload(folder, url)
    assert list(bucket.listed()) == ["penstock-upload"]
    samples.upload(folder, url, overwrite=True)
    assert objects(url) == contents(folder)
    bucket.write("penstock-upload", b"somebody")
    with pytest.raises(SampleError, match="somebody else packs or uploads to"):
        samples.upload(folder, url)
    assert bytes(bucket.read("penstock-upload")) == b"somebody"


def test_a_server_that_cannot_refuse_one_of_two_is_told_of(
    url: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    pack_below(url, tmp_path / "staging")
    assert objects(url) == contents(folder)
    (said,) = (record.message for record in caplog.records if url in record.message)
    assert "cannot refuse one of two writers that begin at once" in said


def test_what_fails_once_the_store_is_whole_is_logged(
    url: str,
    proxy: Proxy,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    staging, open_files = tmp_path / "staging", list[str]()

    def empty(where: Path, last: str) -> None:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # other threads close theirs
                open_files.append(os.readlink(f"/proc/self/fd/{name}"))
        (where / ".nfs0001").touch()  # as of a file that is open elsewhere
        remove(where, last)

    remove = progress.empty
    monkeypatch.setattr(progress, "empty", empty)
    proxy.answer = lambda line, number: 403 if line.endswith("?delete") else None
    with Sending(Bucket(url)) as sending:
        pack_often(Listed(ITEMS), staging, DATA_FILE_BYTES, sending=sending)
    assert not any(Path(name).parent == staging for name in open_files)
    assert [path.name for path in staging.iterdir()] == [".nfs0001"]
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2
    assert f"{url} is whole. Delete penstock-upload there" in said[0]
    assert f"the store is whole. Remove {staging}, where its files waited" in said[1]
    proxy.answer = lambda line, number: None
    Bucket(url).delete(["penstock-upload"])
    assert objects(url) == contents(folder)


def test_an_interrupt_at_the_end_publishes_nothing(url: str, folder: Path, tmp_path: Path) -> None:
    def interrupt(count: int, size_bytes: int) -> None:
        if count == len(ITEMS):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_below(url, tmp_path / "staging", report=interrupt)
    with pytest.raises(SampleError, match="no sample store"):
        samples.mount(url)
    pack_below(url, tmp_path / "staging")
    assert objects(url) == contents(folder)


def test_what_another_version_began_is_left_alone(url: str, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        pack_below(url, tmp_path / "staging", Listed(ITEMS, stop=50))
    begun, there = progress.read(tmp_path / "staging"), Bucket(url).listed()
    assert begun is not None
    replace(begun, state=b"another").save(tmp_path / "staging" / progress.PROGRESS)
    with pytest.raises(SampleError, match="was begun by another version of penstock"):
        pack_below(url, tmp_path / "staging")
    assert Bucket(url).listed() == there


def test_the_source_may_be_the_current_folder_but_not_hold_what_waits(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.bin").write_bytes(b"one")
    monkeypatch.chdir(tmp_path / "photos")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "photos"))
    with pytest.raises(InvalidArgument, match="lies in the source"):
        samples.pack(".", url)
    assert [path.name for path in Path().iterdir()] == ["1.bin"]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    samples.pack(".", url)
    with samples.mount(url) as store:
        assert store.read("1.bin") == b"one"


def test_places_that_cannot_be_written_are_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgument, match="cannot be written by HTTP"):
        samples.pack(ITEMS, "https://127.0.0.1:1/x")
    with pytest.raises(InvalidArgument, match="for a namespace upload the packed store then"):
        samples.pack(ITEMS, "nvme+tcp://127.0.0.1/nqn.2014-08.org.example:x?ns=1")
    with pytest.raises(InvalidArgument, match=r"staging=.* is for objects"):
        samples.pack(ITEMS, tmp_path / "here", staging=tmp_path / "staging")
    with pytest.raises(InvalidArgument, match="is not a local folder"):
        samples.unpack(url, url)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    staging_path(url).mkdir()
    staging_path(url).chmod(0o777)
    with pytest.raises(SampleError, match="is not a private folder of this user: give staging="):
        samples.pack(ITEMS[:1], url)


def test_the_command_packs_below_a_url(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(5):
        (tmp_path / "photos" / f"{number}.bin").write_bytes(bytes([number]) * 1000)
    staging = str(tmp_path / "staging")
    assert cli.main(["samples", "pack", str(tmp_path / "photos"), url, "--staging", staging]) == 0
    assert url in capsys.readouterr().out
    with samples.mount(url) as store:
        assert store.read("3.bin") == bytes([3]) * 1000


def test_partitions_and_whole_stores_do_not_meet(url: str, folder: Path, tmp_path: Path) -> None:
    """Neither can be mounted beside the other."""
    partition: dict[str, Any] = {"chunk_bytes": 4096, "rank": 0, "world_size": 2}
    with pytest.raises(Stopped):
        samples.pack(Listed(ITEMS, stop=20), url, staging=tmp_path / "parts", **partition)
    assert Bucket(url).listed().keys() >= {"part-00000-of-00002/penstock-upload"}
    with pytest.raises(SampleError, match=r"somebody else packs or uploads to .*part-00000-of-00002"):
        samples.upload(folder, url)
    with pytest.raises(SampleError, match=r"somebody else packs or uploads to .*part-00000-of-00002"):
        pack_below(url, tmp_path / "whole")
    other = f"{url}-whole"
    with pytest.raises(Stopped):
        pack_below(other, tmp_path / "other", Listed(ITEMS, stop=20))
    with pytest.raises(InvalidArgument, match="a store without partitions"):
        samples.pack(Listed(ITEMS), other, staging=tmp_path / "parts of it", **partition)
