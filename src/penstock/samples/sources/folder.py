"""Samples of a folder tree: a file each."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from penstock.errors import SampleError
from penstock.samples.layout import text_of
from penstock.samples.sources.source import Numbered, RawSample, printable, read_up_to

_log = logging.getLogger("penstock")


@dataclass(frozen=True)
class Files(Numbered):
    """The regular files below a folder, in the order of their names' bytes."""

    root: bytes
    follow_links: bool
    tops: tuple[str, ...]

    def names(self) -> Iterator[str]:
        return (text_of(name) for name in self._mine(0))

    def after(self, samples: int) -> Iterator[RawSample]:
        labels = {name: label for label, name in enumerate(self.tops)}
        for name in self._mine(samples):
            text = text_of(name)
            label = labels.get(text.partition("/")[0], -1) if labels else -1
            yield RawSample(text, _read(os.path.join(self.root, name), self.follow_links), label)

    def _mine(self, skip: int) -> Iterator[bytes]:
        mine, found = self.mine[skip:], 0
        for name in _walk(self.root, self.follow_links, []):
            if mine.start <= found < mine.stop:
                yield name
            found += 1
        if found != self.whole:
            raise SampleError(
                f"{text_of(self.root)} had {self.whole} files, and has {found} now: leave it as it "
                "is while it is packed, and pack it again"
            )


def open_folder(path: str | os.PathLike[str], *, follow_links: bool = False) -> Files:
    """Samples of the regular files below ``path``, named by their path from there, with "/".

    Where every file lies in a folder of the first level, those are the classes. Symbolic links are left out
    (and counted in the log), or followed, as long as they lead to something below ``path``.

    Raises SampleError where the folder cannot be read, or a link leads out of it.
    """
    root = os.fsencode(path)
    tops: dict[bytes, None] = {}
    skipped: list[bytes] = []
    whole, in_folders = 0, True
    for name in _walk(root, follow_links, skipped):
        whole += 1
        top, slash, _ = name.partition(b"/")
        in_folders = in_folders and bool(slash)
        if in_folders:
            tops[top] = None
    if not whole:
        raise SampleError(f"{text_of(root)} has no files: nothing to pack")
    if skipped:
        _log.warning(
            "%s: %d entries are not regular files and are left out (follow_links=True follows links): %s",
            text_of(root),
            len(skipped),
            ", ".join(map(text_of, skipped[:3])) + (", ..." if len(skipped) > 3 else ""),
        )
    description = f"folder {printable(text_of(os.path.basename(os.path.abspath(root))))}"
    names = tuple(map(text_of, sorted(tops))) if in_folders else ()
    return Files(description, "raw", tuple(map(printable, names)), whole, None, root, follow_links, names)


def _walk(
    root: bytes, follow_links: bool, skipped: list[bytes], below: bytes = b"", above: tuple[object, ...] = ()
) -> Iterator[bytes]:
    """Names of files below root, sorted by their bytes. Memory holds one listing for each level.

    below   a folder in it; above: those that it lies in
    """
    try:
        found = os.stat(os.path.join(root, below))
    except OSError as error:
        raise SampleError(f"{text_of(os.path.join(root, below))} cannot be read: {error.strerror}") from error
    identity = found.st_dev, found.st_ino
    if identity in above:
        raise SampleError(
            f"{text_of(below)} in {text_of(root)} is a link to a folder that it lies in: remove it"
        )
    for name in _listing(root, below, skipped, follow_links):
        if name.endswith(b"/"):
            yield from _walk(root, follow_links, skipped, name, (*above, identity))
        else:
            yield name


def _listing(root: bytes, below: bytes, skipped: list[bytes], follow_links: bool) -> list[bytes]:
    """Names in a folder; of folders with a slash at the end, so that they sort as what is in them."""
    names = []
    try:
        with os.scandir(os.path.join(root, below)) as entries:
            for entry in entries:
                name = below + entry.name
                is_link = entry.is_symlink()
                if is_link and follow_links:
                    _check_inside(entry.path, name, os.path.realpath(root))
                if is_link and not follow_links:
                    skipped.append(name)
                elif entry.is_dir():
                    names.append(name + b"/")
                elif entry.is_file():
                    names.append(name)
                else:
                    skipped.append(name)
    except SampleError:
        raise
    except OSError as error:
        raise SampleError(
            f"folder {text_of(os.path.join(root, below))} cannot be listed: {error.strerror}"
        ) from error
    return sorted(names)


def _check_inside(path: bytes, name: bytes, real: bytes) -> None:
    target = os.path.realpath(path)
    if not os.path.exists(target):
        raise SampleError(f"the link {text_of(name)} leads to nothing, {text_of(target)}: remove it")
    if target != real and not target.startswith(os.path.join(real, b"")):
        raise SampleError(
            f"the link {text_of(name)} leads out of the folder, to {text_of(target)}: remove it, or leave "
            "out links with follow_links=False"
        )


def _read(path: bytes, follow_links: bool) -> bytes:
    """A whole file. A pipe that took its place would block: hence O_NONBLOCK."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise SampleError(f"{text_of(path)} was a file, and is none now: leave the folder as it is")
            data = read_up_to(partial(os.read, descriptor), found.st_size + 1)  # one more if it has grown
        finally:
            os.close(descriptor)
    except SampleError:
        raise
    except OSError as error:
        gone = "it is gone" if error.errno == errno.ENOENT else error.strerror
        raise SampleError(f"{text_of(path)} cannot be read: {gone}") from error
    if len(data) != found.st_size:
        raise SampleError(
            f"{text_of(path)} changed while it was read: it had {found.st_size} bytes, then "
            f"{'more' if len(data) > found.st_size else len(data)}. Leave it as it is meanwhile"
        )
    return data
