"""Objects in S3, Google Cloud Storage, Azure, or behind HTTP: the one place that speaks to them.

A `Bucket` is what lies under one URL, such as ``s3://bucket/prefix``; `obstore` speaks to the server.
Credentials and endpoints come from where the tools of each service look for them: the environment, the AWS
profile, the roles of the machine. They are never part of a URL, nor of an error.
"""

from __future__ import annotations

import configparser
import errno
import importlib
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from penstock.errors import InvalidArgument, installing
from penstock.storage.objects_elsewhere import Helper

SCHEMES = ("s3", "gs", "az", "https", "http")
READ_ONLY_SCHEMES = ("https", "http")
FORMS = "s3://BUCKET/NAME (gs://, az://)"  # of what can be written
DEFAULT_TIMEOUT_S = 60.0

_URL = re.compile(rf"({'|'.join(SCHEMES)})://", re.IGNORECASE)
_CONNECT_S = 5.0
_BACKOFF_S = (0.1, 5.0)  # the first pause before a request is sent again, and the longest
_MOST_RETRIES = 1000  # the time ends them
_PART_BYTES = 8 << 20  # of an upload, at least
_MOST_PARTS = 9000  # S3 takes 10,000

Buffer: TypeAlias = Any  # what has the buffer protocol


class ObjectError(OSError):
    """An object cannot be read or written. Who asked for it says what that means.

    errno   ENOENT: there is none; EEXIST: there is one; EACCES: refused; ESTALE: it has changed; ETIMEDOUT:
            no answer came in time; ENOTSUP: the server cannot do it; EIO: anything else
    reason  why, without the object's URL
    """

    def __init__(self, number: int, text: str, reason: str = "") -> None:
        super().__init__(number, text)
        self.reason = reason or text

    def __str__(self) -> str:
        return str(self.strerror)


class ObjectInfo(NamedTuple):
    """size_bytes, and tag: another one where the bytes are others (ETag); None where the server has none."""

    size_bytes: int
    tag: str | None


def is_object_url(path: object) -> bool:
    """Whether ``path`` is the URL of objects, by its scheme."""
    return isinstance(path, str) and _URL.match(path) is not None


def was_object_url(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` was such a URL before it became a path, which has one slash."""
    return is_object_url(os.fspath(path).replace(":/", "://", 1))


class Bucket:
    """The objects under a URL. Any number of threads may use it; nothing is asked before it is needed.

    url          as given, without a slash at its end
    is_writable  not behind plain HTTP
    """

    def __init__(self, url: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """``timeout_s``: longest wait for an answer; requests that fail are sent again for half of it.

        Raises InvalidArgument where the URL cannot be used, or the extra ``cloud`` is not installed.
        """
        self.url, self._timeout_s = _checked(url), timeout_s
        self.is_writable = not self.url.startswith(READ_ONLY_SCHEMES)
        self._store = open_store(self.url, timeout_s)

    def __str__(self) -> str:
        return self.url

    def __reduce__(self) -> tuple[type, tuple[str, float]]:
        return Bucket, (self.url, self._timeout_s)

    def url_of(self, name: str) -> str:
        """The URL of an object."""
        return f"{self.url}/{name}" if name else self.url

    def require_writable(self) -> None:
        """Raises InvalidArgument."""
        if not self.is_writable:
            raise InvalidArgument(f"{self.url} cannot be written by HTTP: give {FORMS}")

    def info(self, name: str) -> ObjectInfo:
        """Of an object. Raises ObjectError."""
        with self._asking(name, "read") as store:
            return _info(store.head(name))

    def listed(self, under: str = "") -> dict[str, ObjectInfo]:
        """The objects whose names begin with ``under/``, or all, by name. Raises ObjectError.

        Not for HTTP, which cannot list: ENOTSUP.
        """
        if not self.is_writable:
            raise ObjectError(errno.ENOTSUP, f"{self.url_of(under)} cannot be listed: HTTP has no way to")
        found: dict[str, ObjectInfo] = {}
        with self._asking(under, "listed") as store:
            for batch in store.list(under or None):
                found |= {each["path"]: _info(each) for each in batch}
        return found

    def folders(self) -> list[str]:
        """The names directly below the URL that others lie under. Raises ObjectError."""
        with self._asking("", "listed") as store:
            prefixes = store.list_with_delimiter()["common_prefixes"]
        return [str(each).rstrip("/").rpartition("/")[2] for each in prefixes]

    def read(
        self,
        name: str,
        begin: int = 0,
        end: int | None = None,
        tag: str | None = None,
        most_bytes: int | None = None,
    ) -> memoryview:
        """The bytes of an object from ``begin`` up to ``end``, or to its end.

        tag         that `info` gave: where the object has another one, that is an error
        most_bytes  an object that is larger is an error, EFBIG

        Raises ObjectError, also where the object ends before ``end``.
        """
        if end is not None and end <= begin:
            return memoryview(b"")
        options: dict[str, Any] = {} if tag is None else {"if_match": tag}
        if end is not None:
            options["range"] = (begin, end)
        elif begin:
            options["range"] = {"offset": begin}
        with self._asking(name, "read") as store:
            result = store.get(name, options=options)
            if most_bytes is not None and (size_bytes := int(result.meta["size"])) > most_bytes:
                reason = f"it has {size_bytes} bytes, more than {most_bytes}"
                raise ObjectError(errno.EFBIG, f"{self.url_of(name)} cannot be read: {reason}", reason)
            data = memoryview(result.buffer())
        if end is not None and data.nbytes != end - begin:
            raise ObjectError(
                errno.ESTALE,
                f"{self.url_of(name)} cannot be read: it ends at byte {begin + data.nbytes}, not {end}",
            )
        return data

    def write(
        self,
        name: str,
        data: Buffer | Path | Iterable[Buffer],
        *,
        size_bytes: int = 0,
        create: bool = False,
    ) -> ObjectInfo:
        """Write an object, at once: who reads it sees all of the old one, or all of the new one.

        data        its bytes, the path of a file, or its parts in order; an error of theirs leaves nothing
        size_bytes  about how many the parts are together: what is sent at once grows with it
        create      only where there is none, of bytes. EEXIST: there is one, which may be this one: an answer
                    may be lost. ENOTSUP: the server cannot tell

        Raises ObjectError, and InvalidArgument as `require_writable`.
        """
        self.require_writable()
        counted = 0

        def parts(each: Iterable[Buffer]) -> Iterator[Buffer]:
            nonlocal counted
            for part in each:
                counted += memoryview(part).nbytes
                yield part

        if isinstance(data, Path):
            counted = data.stat().st_size
        elif isinstance(data, bytes | bytearray | memoryview):
            counted = memoryview(data).nbytes
        else:
            data = parts(data)
        part_bytes = max(_PART_BYTES, -(-max(counted, size_bytes) // _MOST_PARTS))
        with self._asking(name, "written") as store, _sendable(store, data) as sent:
            mode = "create" if create else "overwrite"
            done = store.put(name, sent, mode=mode, chunk_size=part_bytes)
        return ObjectInfo(counted, done["e_tag"])

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are not there are no error. Raises ObjectError."""
        names = list(names)
        if not names:
            return
        self.require_writable()
        try:
            with self._asking(names[0], "deleted") as store:
                store.delete(names)
        except ObjectError as error:  # of Azure, where one is not there
            if error.errno != errno.ENOENT:
                raise
            for name in names if len(names) > 1 else ():
                self.delete([name])

    @contextmanager
    def _asking(self, name: str, what: str) -> Iterator[Any]:
        """The store, to ask one thing of it. What it raises becomes an ObjectError."""
        try:
            yield _usable(self)
        except ObjectError:
            raise
        except Exception as error:  # obstore's own are of two families
            if (number := _errno_of(error)) is None:
                raise
            where = self.url_of(name)
            reason = _reason(str(error), number)
            raise ObjectError(number, f"{where} cannot be {what}: {reason}", reason) from None


# -- opening -------------------------------------------------------------------------------------


def _checked(url: str) -> str:
    """The URL, without what it must not have. Nothing of a refused one is shown: it may hold a password."""
    if not is_object_url(url):
        raise InvalidArgument(f"{url!r} is no URL of objects: give s3://, gs://, az:// or https://")
    try:
        parts = urlsplit(url)
        has_credentials = parts.username is not None or bool(parts.query or parts.fragment)
        host = parts.hostname
    except ValueError as error:
        raise InvalidArgument(f"a {url[:5].split(':')[0]} URL cannot be read: {error}") from None
    if has_credentials:
        raise InvalidArgument(
            f"the {parts.scheme} URL of {host} has a user, ? or #, which penstock does not take: credentials "
            "belong into the environment or a profile"
        )
    if not host:
        raise InvalidArgument(f"{url!r} names no bucket or host: give {parts.scheme}://BUCKET/PREFIX")
    return url.rstrip("/")


class _Elsewhere:
    """Stands for a store of obstore in a forked process."""

    def __init__(self, helper: Helper, url: str, timeout_s: float) -> None:
        self._helper, self._asked = helper, (url, timeout_s)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._helper.call, *self._asked, method)


@contextmanager
def _sendable(store: Any, data: Any) -> Iterator[Any]:
    """What is to be written, as the store takes it: parts go to another process through a file."""
    if not isinstance(store, _Elsewhere) or isinstance(data, bytes | bytearray | Path):
        yield data
    elif isinstance(data, memoryview):
        yield bytes(data)
    else:
        with tempfile.NamedTemporaryFile(prefix="penstock-") as file:
            for part in data:
                file.write(part)
            file.flush()
            yield Path(file.name)


_used_in: int | None = None  # the process in which obstore has its threads
_helper: tuple[int, Helper] | None = None  # of a forked process, by its id
_starting = threading.Lock()


def _usable(bucket: Bucket) -> Any:
    """The store of a bucket, or what stands for it in a process that was forked since objects were used."""
    global _helper, _used_in
    process = os.getpid()
    if _used_in is None:
        _used_in = process
    if _used_in == process:
        return bucket._store
    with _starting:
        if _helper is None or _helper[0] != process or _helper[1].has_ended:
            try:
                _helper = process, Helper()
            except (OSError, RuntimeError) as error:  # of its limits
                reason = f"a forked process cannot start the one that asks for objects: {error}"
                number = getattr(error, "errno", None) or errno.EAGAIN
                raise ObjectError(number, f"{bucket.url} cannot be used: {reason}", reason) from error
    return _Elsewhere(_helper[1], bucket.url, bucket._timeout_s)


def _after_fork() -> None:
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def open_store(url: str, timeout_s: float) -> Any:
    """What obstore has for a URL. Raises InvalidArgument."""
    try:
        stores = importlib.import_module("obstore.store")
    except ImportError:
        raise InvalidArgument(
            f"{url} needs obstore, which the extra penstock[cloud] installs: {installing('cloud')}"
        ) from None
    scheme = url.partition(":")[0].lower()
    config, endpoint = dict[str, str](), os.environ.get("AZURE_STORAGE_ENDPOINT", "")
    if scheme == "s3":
        config = _aws_settings(os.environ)
        endpoint = config.get("endpoint", "")
    elif scheme == "gs" and (endpoint := os.environ.get("STORAGE_EMULATOR_HOST", "")):
        unsigned = {"client_email": "", "private_key": "", "private_key_id": "", "disable_oauth": True}
        config = {"service_account_key": json.dumps({"gcs_base_url": endpoint, **unsigned})}
    client = {
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=min(_CONNECT_S, timeout_s)),
        "allow_http": scheme == "http" or endpoint.startswith("http://"),
        "user_agent": "penstock",
    }
    first_s, longest_s = _BACKOFF_S
    retry = {
        "max_retries": _MOST_RETRIES,
        "retry_timeout": timedelta(seconds=timeout_s / 2),
        "backoff": {
            "init_backoff": timedelta(seconds=first_s),
            "max_backoff": timedelta(seconds=longest_s),
            "base": 2,
        },
    }
    options: dict[str, Any] = {"client_options": client, "retry_config": retry}
    try:
        if scheme in READ_ONLY_SCHEMES:
            return stores.HTTPStore.from_url(url, **options)
        return stores.from_url(url, **options, **({"config": config} if config else {}))
    except Exception as error:
        raise InvalidArgument(f"{url} cannot be used: {_reason(str(error), errno.EINVAL)}") from None


def _aws_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What obstore does not find by itself: the endpoint, and what a profile says, for `from_url`.

    Keys in the environment come before those of a profile; without either the roles of the machine are asked.
    """
    home = Path.home() / ".aws"
    files = configparser.ConfigParser(interpolation=None)
    paths = (
        (environment.get("AWS_CONFIG_FILE") or home / "config"),
        (environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials"),
    )
    name = environment.get("AWS_PROFILE", "")
    profile: dict[str, str] = {}
    for path in paths:
        files.clear()
        try:
            files.read(path)
        except (configparser.Error, UnicodeDecodeError) as error:
            raise InvalidArgument(
                f"{path} cannot be read as an AWS profile: {type(error).__name__}"
            ) from None
        for section in (name or "default", f"profile {name}"):
            if files.has_section(section):
                profile |= dict(files.items(section))
    if name and not profile:
        raise InvalidArgument(f"AWS_PROFILE={name!r}: {paths[0]} and {paths[1]} have no such profile")
    found = {}
    if "aws_access_key_id" in profile and "AWS_ACCESS_KEY_ID" not in environment:
        keys = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
        found = {key: profile[key] for key in keys if key in profile}
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or profile.get("region")
    endpoint = (
        environment.get("AWS_ENDPOINT_URL_S3")
        or environment.get("AWS_ENDPOINT_URL")
        or profile.get("endpoint_url")
    )
    return found | ({"region": region} if region else {}) | ({"endpoint": endpoint} if endpoint else {})


# -- answers -------------------------------------------------------------------------------------


def _info(meta: Mapping[str, Any]) -> ObjectInfo:
    tag = meta["e_tag"]
    if tag and not tag.endswith('"'):  # Azure lists them without quotes
        tag = f'"{tag}"'
    return ObjectInfo(int(meta["size"]), tag)


_STATUS = re.compile(r"status code: (\d{3}) ?([A-Za-z -]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_OF_STATUS = {
    401: errno.EACCES,
    403: errno.EACCES,
    404: errno.ENOENT,
    412: errno.ESTALE,
    416: errno.ESTALE,
    429: errno.ETIMEDOUT,
    501: errno.ENOTSUP,
}
_OF_NAME = {
    "NotFoundError": errno.ENOENT,
    "FileNotFoundError": errno.ENOENT,
    "PermissionDeniedError": errno.EACCES,
    "UnauthenticatedError": errno.EACCES,
    "PreconditionError": errno.ESTALE,
    "AlreadyExistsError": errno.EEXIST,
    "NotImplementedError": errno.ENOTSUP,
}


def _errno_of(error: Exception) -> int | None:
    """None where it does not come from obstore."""
    kind = type(error)
    if (number := _OF_NAME.get(kind.__name__)) is not None:
        return number
    if not kind.__module__.startswith(("obstore", "builtins")) or isinstance(error, TypeError | MemoryError):
        return None
    text = str(error)
    if found := _STATUS.search(text):
        status = int(found[1])
        return _OF_STATUS.get(status, errno.ETIMEDOUT if status >= 500 else errno.EIO)
    if any(word in text for word in ("error sending request", "kind: Connect", "timed out", "TimedOut")):
        return errno.ETIMEDOUT
    return errno.EIO if kind.__module__.startswith("obstore") else None


def _reason(text: str, number: int) -> str:
    """Why, in a few words, without anything that could be a secret."""
    code = f" ({found[1]})" if (found := _CODE.search(text)) else ""
    if found := _STATUS.search(text):
        return f"the server answers {found[1]} {found[2].strip()}{code}"
    if number == errno.ETIMEDOUT:
        return "the server cannot be reached, or does not answer in time"
    first = re.sub(r"\S*(://|[?&=])\S*", "...", text.partition("\n")[0])
    return first[:200]
