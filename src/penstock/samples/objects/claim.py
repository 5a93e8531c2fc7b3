"""One writer below a URL: while a store is written there, an object says by whom.

Where the server can create an object only if there is none, one of two writers that begin at once is refused.
Elsewhere the later one has taken over. Who was taken over stops before its next object appears; one whose
last parts were on their way may still come.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from penstock.errors import SampleError
from penstock.samples.layout import MANIFEST, UPLOADED
from penstock.storage.objects import Bucket, ObjectError, ObjectInfo

logger = logging.getLogger("penstock")

NOTE = "penstock-upload"  # that object's name
PART_BYTES = 8 << 20


class Claim:
    """The claim of one writer to what is below a URL.

    there    what is there of stores, by name
    is_held  the claim was made before: what is there is its writer's

    Its functions raise ObjectError.
    """

    def __init__(self, bucket: Bucket, who: bytes) -> None:
        """``who``: the writer, the same when it goes on."""
        self._bucket, self._who = bucket, who
        self._found = self._noted()
        listed = bucket.listed()
        self.there = _of_stores(listed)
        self._part = next((name for name in listed if name.endswith(f"/{NOTE}")), None)

    @property
    def is_held(self) -> bool:
        return self._found == self._who

    def check_free(self, *, is_same: bool = False) -> None:
        """Raises SampleError where another writer has the claim, or another store is there.

        is_same   the store there is the one to be written
        """
        if self._found not in (None, self._who) or self._part is not None:
            raise SampleError(
                f"somebody else packs or uploads to {self._bucket}, as {self._part or NOTE} there says: "
                "nothing was written. Wait until that has ended, or give another prefix. If it never will, "
                "replace what it has written with overwrite=True (--overwrite)"
            )
        if self.there and self._found is None and not is_same:
            what = "is already a store" if manifests(self.there) else "holds a part of another store"
            raise SampleError(
                f"{self._bucket} {what}: nothing was written. Give another prefix, or replace it with "
                "overwrite=True (--overwrite)"
            )

    def take(self, kept: Collection[str]) -> None:
        """Make the claim, also where another writer has it, and delete what is there but ``kept``.

        Raises SampleError where another writer makes it at the same time.
        """
        there = self.there
        if self._found is None:
            if self._create() and self._listed() != there:
                self._bucket.delete([NOTE])
                raise self._taken()
        elif not self.is_held:
            self._bucket.write(NOTE, self._who)
            there = self._listed()  # with what the other has written meanwhile
        replaced = there.keys() - kept
        for names in (manifests(replaced), replaced):  # what nobody can mount any more may be replaced
            self._check()
            self._bucket.delete(names)
        self._check()

    def write(self, name: str, parts: Iterable[bytes], size_bytes: int) -> None:
        """Write an object of parts, which are so many bytes together.

        Raises SampleError, and then leaves nothing of it, where another writer has made the claim.
        """

        def claimed() -> Iterator[bytes]:
            yield from parts
            with ThreadPoolExecutor(1) as other:  # on a thread that writes obstore can ask for nothing
                other.submit(self._check).result()

        data = b"".join(claimed()) if size_bytes <= PART_BYTES else claimed()
        self._bucket.write(name, data, size_bytes=size_bytes)

    def check_whole(self, sizes: Mapping[str, int]) -> None:
        """Raises SampleError where another writer has taken over, or has deleted or replaced what was sent:
        these objects, of so many bytes."""
        self._check()
        there = self._listed()
        if any(name not in there or there[name].size_bytes != size for name, size in sizes.items()):
            raise self._taken()

    def give_up(self) -> None:
        """The store is whole. What goes wrong is logged."""
        try:
            if self._noted() == self._who:
                self._bucket.delete([NOTE])
        except ObjectError as error:
            logger.warning("%s is whole. Delete %s there, which could not be: %s", self._bucket, NOTE, error)

    def _create(self) -> bool:
        """The note. False: there is one, which may be ours, as an answer may have been lost."""
        try:
            self._bucket.write(NOTE, self._who, create=True)
        except ObjectError as error:
            if error.errno == errno.EEXIST:
                return False
            if error.errno != errno.ENOTSUP:
                raise
            logger.warning(
                "the server of %s cannot refuse one of two writers that begin at once: see to it that nobody "
                "else packs or uploads there",
                self._bucket,
            )
            self._bucket.write(NOTE, self._who)
        return True

    def _noted(self) -> bytes | None:
        """Who writes there; None: nobody."""
        try:
            return bytes(self._bucket.read(NOTE))
        except ObjectError as error:
            if error.errno != errno.ENOENT:
                raise
            return None

    def _listed(self) -> dict[str, ObjectInfo]:
        return _of_stores(self._bucket.listed())

    def _check(self) -> None:
        if self._noted() != self._who:
            raise self._taken()

    def _taken(self) -> SampleError:
        return SampleError(
            f"somebody else has begun to write to {self._bucket}: give another prefix, or try again once "
            "that has ended"
        )


def _of_stores(listed: Mapping[str, ObjectInfo]) -> dict[str, ObjectInfo]:
    return {name: info for name, info in listed.items() if UPLOADED.fullmatch(name)}


def manifests(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.endswith(MANIFEST)]
