"""Writing a packed store below a URL. A broken-off upload goes on with the files that are missing."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import InvalidFile
from penstock.samples.failures import cannot_open
from penstock.samples.layout import MANIFEST
from penstock.samples.manifest import AGAIN, reading
from penstock.samples.objects.claim import PART_BYTES, Claim, manifests
from penstock.samples.objects.place import as_sample_errors
from penstock.samples.places import Progress
from penstock.samples.remote.local import LocalStore, Upload
from penstock.storage.checksum import crc32c
from penstock.storage.objects import Bucket


def upload_to_objects(bucket: Bucket, store: LocalStore, *, overwrite: bool, progress: Progress) -> Upload:
    """See `penstock.samples.upload`. A store is whole once its manifests are there, which come last."""
    with as_sample_errors():
        claim = Claim(bucket, store.store_id)
        there = claim.there
        is_here = store.sizes == {name: info.size_bytes for name, info in there.items()} and all(
            bytes(bucket.read(name)) == store.paths[name].read_bytes() for name in manifests(store.sizes)
        )
        if not overwrite:
            claim.check_free(is_same=is_here)
        total_bytes = sum(store.sizes.values())
        left: list[str] = []
        if overwrite or not is_here:
            done = {name for name in store.sizes if claim.is_held and not overwrite and name in there}
            done = {name for name in done if there[name].size_bytes == store.sizes[name]}
            left = [name for name in store.sizes if name not in done]
            claim.take(done)
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

            claim.write(name, parts(), size_bytes)
            durable_bytes += size_bytes
        if left:
            claim.check_whole(store.sizes)
        claim.give_up()
    return Upload(
        url=bucket.url,
        samples=store.samples,
        files=len(store.sizes),
        size_bytes=total_bytes,
        written_bytes=written_bytes,
        used_bytes=total_bytes,
    )


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
