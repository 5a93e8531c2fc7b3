"""Writing a packed store below a URL. A broken-off upload goes on with the files that are missing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from penstock.errors import InvalidFile, SampleError
from penstock.samples.failures import cannot_open
from penstock.samples.layout import MANIFEST, UPLOADED
from penstock.samples.manifest import AGAIN, reading
from penstock.samples.objects.place import as_sample_errors
from penstock.samples.places import Progress
from penstock.samples.remote.local import LocalStore, Upload
from penstock.storage.checksum import crc32c
from penstock.storage.objects import Bucket

NOTE = "penstock-upload"  # the object that says which store is being uploaded, or packed
PART_BYTES = 8 << 20


def upload_to_objects(bucket: Bucket, store: LocalStore, *, overwrite: bool, progress: Progress) -> Upload:
    """See `penstock.samples.upload`. A store is whole once its manifests are there, which come last."""
    with as_sample_errors():
        there = bucket.listed()
        ours = {name: info for name, info in there.items() if UPLOADED.fullmatch(name)}
        is_here = store.sizes == {name: info.size_bytes for name, info in ours.items()} and all(
            bytes(bucket.read(name)) == store.paths[name].read_bytes() for name in _manifests(store.sizes)
        )
        goes_on = NOTE in there and bytes(bucket.read(NOTE)) == store.store_id
        if ours and not (overwrite or is_here or goes_on):
            what = (
                "a part of another store, whose upload was broken off" if NOTE in there else "another store"
            )
            raise SampleError(
                f"{bucket} holds {what}: nothing was written. Give another prefix, or replace it with "
                "overwrite=True (--overwrite)"
            )
        total_bytes = sum(store.sizes.values())
        left: list[str] = []
        if overwrite or not is_here:
            done = {name for name in store.sizes if goes_on and not overwrite and name in ours}
            done = {name for name in done if ours[name].size_bytes == store.sizes[name]}
            left = [name for name in store.sizes if name not in done]
            claim(bucket, store.store_id, ours.keys() - done)
        durable_bytes = total_bytes - sum(store.sizes[name] for name in left)
        written_bytes = total_bytes - durable_bytes
        progress(durable_bytes, total_bytes)
        for name in sorted(left, key=lambda name: name.endswith(MANIFEST)):  # these last
            size_bytes = store.sizes[name]

            def parts(name: str = name, begin_bytes: int = durable_bytes) -> Iterator[bytes]:
                for part in _parts(store, name):
                    yield part
                    begin_bytes += len(part)
                    progress(begin_bytes, total_bytes)

            write(bucket, name, parts(), size_bytes)
            durable_bytes += size_bytes
        bucket.delete([NOTE] if NOTE in there or left else [])
    return Upload(
        url=bucket.url,
        samples=store.samples,
        files=len(store.sizes),
        size_bytes=total_bytes,
        written_bytes=written_bytes,
        used_bytes=total_bytes,
    )


def claim(bucket: Bucket, note: bytes, replaced: Collection[str]) -> None:
    """Say by the note whose store is written here from now on, and delete what is there of another one.

    Raises ObjectError.
    """
    bucket.delete(_manifests(replaced))  # what nobody can mount any more may be replaced
    bucket.write(NOTE, note)
    bucket.delete(replaced)


def write(bucket: Bucket, name: str, parts: Iterable[bytes], size_bytes: int) -> None:
    """Write an object of parts, which are so many bytes together. Raises ObjectError."""
    bucket.write(name, b"".join(parts) if size_bytes <= PART_BYTES else parts, size_bytes=size_bytes)


def _manifests(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.endswith(MANIFEST)]


def _parts(store: LocalStore, name: str) -> Iterator[bytes]:
    """The bytes of a file. Raises InvalidFile at its end where they are not what its manifest says."""
    path, crc, size_bytes = store.paths[name], 0, 0
    try:
        with reading(path) as file:
            while part := file.read(PART_BYTES):
                crc, size_bytes = crc32c(part, crc), size_bytes + len(part)
                yield part
    except OSError as error:
        raise cannot_open(path, error) from error
    if size_bytes != store.sizes[name] or store.sums.get(name, crc) != crc:
        raise InvalidFile(f"{path} is damaged: its checksum is wrong. {AGAIN}")
