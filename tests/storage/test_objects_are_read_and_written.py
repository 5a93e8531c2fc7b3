"""The seam to object stores, against a real S3 server and an HTTP server that misbehaves as it is told."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import samples
from penstock.errors import InvalidArgument, SampleError
from penstock.storage import objects
from penstock.storage.objects import Bucket, ObjectError
from tests.support.object_servers import ACCESS_KEY, S3, SECRET_KEY, HttpServer, Proxy, free_ports, writes
from tests.support.stores import write_store

pytest.importorskip("obstore", reason="obstore is not installed: the extra cloud")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[HttpServer]:
    (tmp_path / "a").write_bytes(bytes(range(256)) * 8)
    with HttpServer(tmp_path) as server:
        yield server


def test_what_is_written_is_read_by_ranges(s3: S3) -> None:
    bucket, data = Bucket(s3.url("seam/ranges")), bytes(range(256)) * 16
    written = bucket.write("x/y", data)
    assert written.size_bytes == len(data) and bucket.info("x/y") == written
    assert bucket.listed() == {"x/y": written} == bucket.listed("x") and bucket.folders() == ["x"]

    @given(st.tuples(st.integers(0, len(data)), st.integers(0, len(data))).map(sorted))
    def every_range(ends: list[int]) -> None:
        begin, end = ends
        assert bytes(bucket.read("x/y", begin, end, written.tag)) == data[begin:end]

    every_range()
    assert bytes(bucket.read("x/y")) == data and bytes(bucket.read("x/y", 4000)) == data[4000:]
    bucket.delete(["x/y", "none"])
    assert bucket.listed() == {}


def test_parts_become_one_object_or_none(s3: S3, tmp_path: Path) -> None:
    bucket, part = Bucket(s3.url("seam/parts")), bytes(range(256)) * (5 << 12)
    assert bucket.write("whole", iter([part] * 4)).size_bytes == 4 * len(part)
    assert bytes(bucket.read("whole")) == part * 4
    (tmp_path / "file").write_bytes(part)
    bucket.write("file", tmp_path / "file")
    assert bytes(bucket.read("file")) == part

    def breaks() -> Iterator[bytes]:
        yield part * 2
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        bucket.write("whole", breaks())
    assert bytes(bucket.read("whole")) == part * 4


def test_an_object_is_created_only_where_there_is_none(
    proxy: Proxy, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(s3.url("seam/created"), 1)
    bucket.write("x", b"first", create=True)
    with pytest.raises(ObjectError) as caught:
        bucket.write("x", b"second", create=True)
    assert caught.value.errno == errno.EEXIST and bytes(bucket.read("x")) == b"first"
    proxy.answer = lambda line, number: 501 if writes(line) else None
    with pytest.raises(ObjectError, match="answers 501") as caught:
        bucket.write("y", b"", create=True)
    assert caught.value.errno == errno.ENOTSUP
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    with pytest.raises(ObjectError) as caught:
        Bucket(s3.url("seam/created")).write("x", b"second", create=True)
    assert caught.value.errno == errno.ENOTSUP and bytes(bucket.read("x")) == b"first"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("https://user:sesame@host/x", "has a user"),
        ("https://host/x?sig=sesame", "has a user"),
        ("s3:///sesame", "names no bucket"),
        ("ftp://host/x", "no URL of objects"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text) as caught:
        Bucket(url)
    assert "user:" not in str(caught.value) and "sig=" not in str(caught.value)


def test_what_is_not_there_is_named(s3: S3) -> None:
    for url, name in ((s3.url("seam/none"), "x"), ("s3://no-such-bucket/seam", "x")):
        with pytest.raises(ObjectError, match=f"{url}/{name} cannot be read: .*404") as caught:
            Bucket(url).read(name)
        assert caught.value.errno == errno.ENOENT
    with pytest.raises(ObjectError, match=r"no-such-bucket/seam cannot be listed.*NoSuchBucket"):
        Bucket("s3://no-such-bucket/seam").listed()


def test_a_refused_key_is_an_error_without_the_key(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    with pytest.raises(ObjectError, match="403 Forbidden") as caught:
        Bucket(s3.url("seam")).read("x")
    assert caught.value.errno == errno.EACCES
    for secret in ("another-secret", SECRET_KEY, ACCESS_KEY):
        assert secret not in f"{caught.value} {caught.value!r}"


def test_keys_region_and_endpoint_come_from_a_profile(
    s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in s3.environment:
        monkeypatch.delenv(name)
    keys = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    (tmp_path / "credentials").write_text(f"[default]\naws_access_key_id = x\n[mine]\n{keys}")
    (tmp_path / "config").write_text(f"[profile mine]\nregion = us-east-1\nendpoint_url = {s3.endpoint}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    bucket = Bucket(s3.url("seam/profile"))
    bucket.write("x", b"yes")
    assert bytes(bucket.read("x")) == b"yes"
    monkeypatch.setenv("AWS_PROFILE", "yours")
    with pytest.raises(InvalidArgument, match=r"AWS_PROFILE='yours'.*no such profile"):
        Bucket(s3.url("seam/profile"))


@pytest.mark.parametrize("answer", [503, 500, 429, "drop"])
def test_a_server_in_trouble_is_asked_again(served: HttpServer, answer: int | str) -> None:
    served.answer = lambda path, number: answer if number <= 2 else None
    assert bytes(Bucket(served.url).read("a", 1, 4)) == b"\1\2\3"
    assert len(served.requests) == 3


def test_a_server_that_stays_in_trouble_is_an_error_after_a_bounded_time(served: HttpServer) -> None:
    served.answer = lambda path, number: 503
    with pytest.raises(ObjectError, match=f"{served.url}/a cannot be read: the server answers 503") as caught:
        Bucket(served.url, timeout_s=1).read("a")
    assert caught.value.errno == errno.ETIMEDOUT and len(served.requests) > 1
    (port,) = free_ports(1)
    with pytest.raises(ObjectError, match="cannot be reached") as caught:
        Bucket(f"http://127.0.0.1:{port}", timeout_s=1).read("a")
    assert caught.value.errno == errno.ETIMEDOUT


PARTS = [bytes(range(256)) * (1 << 15), b"and a second part"]


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [(503, "whole"), (500, "whole"), (429, "whole"), ("drop", "whole"), ("lost", "whole")]
    + [(503, "begin part end"), ("lost", "begin part end")],
)
def test_a_write_is_sent_again(proxy: Proxy, s3: S3, answer: int | str, kinds: str) -> None:
    bucket, asked = Bucket(s3.url("seam/again")), list[str]()

    def first_two(line: str, number: int) -> int | str | None:
        asked.append(writes(line))
        return answer if asked[-1] and asked.count(asked[-1]) <= 2 else None

    proxy.answer = first_two
    bucket.write("x", b"new" if kinds == "whole" else iter(PARTS))
    assert bytes(bucket.read("x")) == (b"new" if kinds == "whole" else b"".join(PARTS))
    assert all(asked.count(kind) >= 3 for kind in kinds.split())


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(503, "whole"), ("hang", "whole"), ("dead", "part"), ("drop", "part"), (503, "end")],
)
def test_a_write_that_meets_only_trouble_is_one_error_and_leaves_the_old_object(
    proxy: Proxy, s3: S3, answer: int | str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, goes_on, asked = Bucket(s3.url("seam/old"), timeout_s=2), threading.Event(), list[str]()
    bucket.write("x", b"old")

    def trouble(line: str, number: int) -> int | str | None:
        asked.append(writes(line))
        if asked[-1] != kind:
            return None
        if answer == "hang":
            goes_on.wait(60)
        elif answer == "dead":
            proxy.__exit__()
        return answer if answer == 503 else "drop"

    proxy.answer = trouble
    with pytest.raises(ObjectError, match=f"{bucket.url}/x cannot be written: the server ") as caught:
        bucket.write("x", b"new" if kind == "whole" else iter(PARTS))
    goes_on.set()
    assert caught.value.errno == errno.ETIMEDOUT
    assert answer != 503 or kind != "whole" or asked.count(kind) > 1
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    assert bytes(Bucket(s3.url("seam/old")).read("x")) == b"old"


def test_an_object_that_changes_or_ends_early_is_an_error(served: HttpServer) -> None:
    bucket = Bucket(served.url)
    info = bucket.info("a")
    (served.folder / "a").write_bytes(bytes(2048))
    with pytest.raises(ObjectError, match="412") as caught:
        bucket.read("a", 0, 5, info.tag)
    assert caught.value.errno == errno.ESTALE
    with pytest.raises(ObjectError, match="ends at byte 2048, not 4096"):
        bucket.read("a", 1024, 4096)


def test_http_is_only_read(served: HttpServer) -> None:
    for change in (lambda: Bucket(served.url).write("b", b"x"), lambda: Bucket(served.url).delete(["b"])):
        with pytest.raises(InvalidArgument, match=f"{served.url} cannot be written by HTTP: give s3://"):
            change()
    with pytest.raises(ObjectError, match="cannot be listed"):
        Bucket(served.url).listed()


def _read_in_child(bucket: Bucket, queue: multiprocessing.Queue[bytes]) -> None:
    try:
        bucket.read("none")
    except ObjectError as error:
        queue.put(str(error).encode())
    queue.put(bytes(bucket.read("x", 1, 3)))
    for data in (iter([b"parts", b" of it"]), memoryview(b"a view")):
        bucket.write("y", data)
        queue.put(bytes(bucket.read("y")))


def test_a_forked_process_reads_and_writes_too(s3: S3) -> None:
    bucket = Bucket(s3.url("seam/fork"))
    bucket.write("x", b"abcd")
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[bytes] = context.Queue()
    child = context.Process(target=_read_in_child, args=(bucket, queue))
    child.start()
    assert b"fork/none cannot be read: the server answers 404" in queue.get(timeout=60)
    assert queue.get(timeout=60) == b"bc"
    assert queue.get(timeout=60) == b"parts of it"
    assert queue.get(timeout=60) == b"a view"
    child.join(60)
    assert child.exitcode == 0


def _read_after_a_kill(bucket: Bucket, queue: multiprocessing.Queue[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        queue.put(bytes(bucket.read("a", 1, 3)))
        assert objects._helper is not None
        helper = objects._helper[1]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if number == signal.SIGINT:  # as a terminal sends it
            os.killpg(os.getpgrp(), number)
        else:
            helper._process.kill()
            helper._process.wait(60)
    while True:
        try:
            queue.put(bytes(bucket.read("a", 1, 3)))
            return
        except ObjectError as error:
            assert error.errno == errno.ETIMEDOUT


def test_a_forked_process_outlives_the_one_that_asks_for_it(served: HttpServer) -> None:
    bucket = Bucket(served.url)
    bucket.read("a")
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[bytes] = context.Queue()

    def alone() -> None:
        os.setpgid(0, 0)
        _read_after_a_kill(bucket, queue)

    child = context.Process(target=alone)
    child.start()
    assert [queue.get(timeout=60) for _ in range(3)] == [b"\1\2"] * 3
    child.join(60)
    assert child.exitcode == 0


def test_a_forked_process_that_may_not_start_another_says_so(tmp_path: Path) -> None:
    write_store(tmp_path / "packed", [("a", b"abc")])
    with (
        HttpServer(tmp_path / "packed") as server,
        samples.mount(server.url, cache_bytes="64KiB") as store,
    ):
        context = multiprocessing.get_context("fork")
        queue: multiprocessing.Queue[bytes] = context.Queue()

        def without_files() -> None:
            store.sequence()  # has its threads
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            try:
                store.bread(1)
            except SampleError as error:
                queue.put(str(error).encode())
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            queue.put(store.read(0))

        child = context.Process(target=without_files, daemon=True)
        child.start()
        said = queue.get(timeout=60)
        assert b"a forked process cannot start the one that asks for objects: [Errno 24]" in said
        assert queue.get(timeout=60) == b"abc"
        child.join(60)
        assert child.exitcode == 0


def test_without_the_extra_its_name_is_said() -> None:
    code = (
        "import sys; sys.modules['obstore'] = sys.modules['obstore.store'] = None\n"
        "from penstock.storage.objects import Bucket\nBucket('s3://bucket/x')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "s3://bucket/x needs obstore, which the extra penstock[cloud] installs: pip install" in done.stderr
