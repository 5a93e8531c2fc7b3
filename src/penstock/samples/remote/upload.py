"""Writing a packed store onto a namespace, so that a broken-off upload goes on where it stopped."""

from __future__ import annotations

import functools
import itertools
import logging
import queue
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic, sleep

from penstock.errors import InvalidArgument, InvalidFile, SampleError
from penstock.samples.failures import cannot_open, from_target
from penstock.samples.manifest import AGAIN, reading
from penstock.samples.places import PathLike, Progress, reporter
from penstock.samples.remote.layout import (
    EXTENT_BYTES,
    PROGRESS_RECORD_BYTES,
    SUPERBLOCK_OFFSETS,
    FileExtent,
    Superblock,
    UploadPlan,
    completed,
    decoded_progress,
    encoded_progress,
    encoded_table,
    plan_upload,
)
from penstock.samples.remote.local import LocalStore, Upload, local_store
from penstock.samples.remote.store import read_superblock
from penstock.storage.aligned import AlignedBuffer, align_down, align_up
from penstock.storage.checksum import crc32c_at, crc32c_combine
from penstock.storage.nvme.contents import HEAD_BYTES, WRITER_OFFSET, known_contents
from penstock.storage.nvme.lease import NamespaceInUse, NamespaceLease, wait_for_others
from penstock.storage.nvme.namespace import DEFAULT_TIMEOUT_S, Namespace, TargetError
from penstock.storage.nvme.url import parse_url
from penstock.storage.objects import FORMS, Bucket, is_object_url
from penstock.storage.threads import in_parallel
from penstock.units import format_bytes, format_bytes_up, format_seconds

logger = logging.getLogger("penstock")

EXTENTS_AT_ONCE = 8  # between two notes of what is durable
COMPARED_EXTENTS = 4  # of those that are noted as durable, before an upload goes on
SMALLEST_WRITE_BYTES = 4096


def upload(
    store: PathLike,
    url: str,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Upload:
    """Write the packed store at ``store`` to ``url``, from where `mount` reads it.

    store      a store, or the folder in which several processes packed their partitions
    url        ``nvme+tcp://HOST:PORT/NQN?ns=1``: all of the namespace belongs to the store from then on; or
               ``s3://BUCKET/PREFIX``, ``gs://``, ``az://``: other objects below it stay
    overwrite  replace whatever is there; of objects, those of a store, also one that somebody else is writing
    progress   called now and then with the bytes that are durable so far, and those of all files
    timeout_s  longest wait for the target

    An upload that was broken off goes on where it stopped, by the same call. A store that is there already
    is left as it is. Nothing else may use the namespace meanwhile: a second upload is refused.

    Raises SampleError where there is no store, or something else than this store there, or not enough room,
    or somebody else writes there, or the target fails; InvalidFile where the store is damaged;
    InvalidArgument.
    """
    report = reporter(progress)
    if is_object_url(url):
        from penstock.samples.objects.upload import upload_to_objects

        bucket = Bucket(url, timeout_s)
        bucket.require_writable()
        return upload_to_objects(bucket, local_store(store), overwrite=overwrite, progress=report)
    parsed = parse_url(url, FORMS)
    if parsed.fragment:
        raise InvalidArgument(f"{url!r} names a partition: a store takes all of a namespace. Leave # out")
    local = local_store(store)
    try:
        with Namespace(parsed, timeout_s) as namespace:
            return upload_to(
                namespace,
                str(parsed),
                local,
                overwrite=overwrite,
                takeover=parsed.takeover,
                progress=report,
            )
    except TargetError as error:
        raise from_target(error, "The same upload goes on where this one stopped") from error


def upload_to(
    device: Namespace,
    name: str,
    store: LocalStore,
    *,
    overwrite: bool = False,
    takeover: bool = False,
    progress: Progress | None = None,
    extent_bytes: int = EXTENT_BYTES,
) -> Upload:
    """Write ``store`` onto ``device``; see `upload`.

    name          what errors and the result call the device
    takeover      others on machines that give no sign have ended
    extent_bytes  what is written, and noted as written, at once: a multiple of 1 MiB
    """
    plan = plan_upload(store.sizes, extent_bytes=extent_bytes)
    if device.size_bytes < plan.superblock.used_bytes:
        raise SampleError(
            f"{name} is too small: it has {format_bytes(device.size_bytes)}, and the store needs "
            f"{format_bytes_up(plan.superblock.used_bytes)}. Nothing was written: give a larger namespace, "
            "or pack the store in partitions and upload each to a namespace of its own"
        )
    total_bytes, written_bytes = sum(store.sizes.values()), 0
    report = reporter(progress)
    fresh = replace(
        plan.superblock,
        upload_id=secrets.token_bytes(16),
        store_id=store.store_id,
        namespace_bytes=device.size_bytes,
    )
    superblock, _ = _begin(device, name, fresh, overwrite)
    if superblock.complete:
        report(total_bytes, total_bytes)
    else:
        try:
            wait_for_others(device, takeover)
            with NamespaceLease(device) as lease:
                superblock, goes_on = _begin(device, name, fresh, overwrite)  # as it is now
                if not superblock.complete:
                    writer = _StoreUploader(device, name, store, plan._replace(superblock=superblock), lease)
                    done = writer.done() if goes_on else {}
                    if not done:
                        writer.clear()
                    written_bytes = writer.write_extents(done, report)
                    writer.finish(done)
        except NamespaceInUse as held:
            raise SampleError(
                f"{held}: nothing more was written. Wait until that has ended, or give another namespace"
            ) from held
    return Upload(
        url=name,
        samples=store.samples,
        files=len(store.sizes),
        size_bytes=total_bytes,
        written_bytes=written_bytes,
        used_bytes=superblock.used_bytes,
    )


def _begin(device: Namespace, name: str, fresh: Superblock, overwrite: bool) -> tuple[Superblock, bool]:
    """The superblock to upload under, and whether an upload goes on. It is complete where all is done.

    Raises SampleError where something is there that must not be replaced.
    """
    try:
        old, _ = read_superblock(device, name)
    except InvalidFile as error:
        if not overwrite:
            raise SampleError(f"nothing was written: {error}") from error
        return fresh, False
    if old is None:
        head = bytearray(HEAD_BYTES)
        device.read_into(0, memoryview(head))
        if not overwrite and (there := known_contents(head)):
            raise SampleError(
                f"{name} holds {there}: nothing was written. Give another namespace, or destroy what is "
                "there with overwrite=True (--overwrite)"
            )
        return fresh, False
    # The same store, laid out alike: all but these is a function of it.
    is_same = old == replace(
        fresh,
        generation=old.generation,
        complete=old.complete,
        upload_id=old.upload_id,
        namespace_bytes=old.namespace_bytes,
        table_crc32c=old.table_crc32c,
    )
    if is_same and not (old.complete and overwrite):
        return old, not old.complete
    if not is_same and not overwrite:
        what = "another store" if old.complete else "a part of another store, whose upload was broken off"
        raise SampleError(
            f"{name} holds {what}: nothing was written. Give another namespace, or replace it with "
            "overwrite=True (--overwrite)"
        )
    return replace(fresh, generation=old.generation + 1), False


class _StoreUploader:
    """Writes one store. All offsets and sizes are of whole blocks, with zeros behind what is written."""

    def __init__(
        self, device: Namespace, name: str, store: LocalStore, plan: UploadPlan, lease: NamespaceLease
    ) -> None:
        self._device, self._name, self._store, self._plan, self._lease = device, name, store, plan, lease
        self._superblock, self._extent_bytes = plan.superblock, plan.superblock.extent_bytes
        self._block_bytes = max(device.block_bytes, SMALLEST_WRITE_BYTES)
        self._record = AlignedBuffer(align_up(max(self._superblock.progress_bytes, 1), self._block_bytes))
        self._buffers: queue.SimpleQueue[AlignedBuffer] = queue.SimpleQueue()
        self._begun_s = 0.0  # when no superblock of the beginning can land any more

    def done(self) -> dict[int, int]:
        """CRC-32C of the extents that are durable already, by number; none where they cannot be trusted."""
        record = self._record.view()
        self._device.read_into(self._superblock.progress_offset, record)
        done = decoded_progress(record[: self._superblock.progress_bytes], self._superblock)
        last = sorted(done)[-COMPARED_EXTENTS:]
        buffer = AlignedBuffer(self._extent_bytes)
        for extent in self._plan.each_extent():
            if extent.number in last:
                stored_bytes = align_up(extent.size_bytes, self._block_bytes)
                self._device.read_into(extent.offset, buffer.view()[:stored_bytes])
                if crc32c_at(buffer.address, extent.size_bytes) != done[extent.number]:
                    logger.warning(
                        "%s does not hold what was uploaded to it before: all is uploaded anew", self._name
                    )
                    return {}
        return done

    def clear(self) -> None:
        """Begin: from here on nothing is left of what was there before."""
        self._write_superblock(self._superblock)
        self._begun_s = monotonic() + self._device.late_s
        first, second = SUPERBLOCK_OFFSETS
        kept = (first, WRITER_OFFSET, second, HEAD_BYTES)  # blocks that are written by themselves
        for begin, end in itertools.pairwise(kept):
            self._write(begin + self._block_bytes, bytes(end - begin - self._block_bytes))
        self._record = AlignedBuffer(self._record.size_bytes)
        self._device.write(self._superblock.progress_offset, self._record.view())
        self._device.flush()

    def write_extents(self, done: dict[int, int], progress: Progress) -> int:
        """Write those that are not done, and add them there. Returns the bytes that were written."""
        total_bytes = sum(self._store.sizes.values())
        left = [extent for extent in self._plan.each_extent() if extent.number not in done]
        left_bytes = written_bytes = sum(extent.size_bytes for extent in left)
        progress(total_bytes - left_bytes, total_bytes)
        for begin in range(0, len(left), EXTENTS_AT_ONCE):
            some = left[begin : begin + EXTENTS_AT_ONCE]
            self._lease.check()
            in_parallel(functools.partial(self._write_extent, done), some)
            self._device.flush()
            self._record_durable(some, done)
            left_bytes -= sum(extent.size_bytes for extent in some)
            progress(total_bytes - left_bytes, total_bytes)
        return written_bytes

    def finish(self, done: Mapping[int, int]) -> None:
        """Make it a store, now that all extents are durable. Raises InvalidFile where a file was damaged."""
        sums = [0] * len(self._plan.files)
        for extent in self._plan.each_extent():
            sums[extent.file] = crc32c_combine(sums[extent.file], done[extent.number], extent.size_bytes)
        files = [file._replace(crc32c=crc) for file, crc in zip(self._plan.files, sums, strict=True)]
        for file in files:
            if self._store.sums.get(file.name, file.crc32c) != file.crc32c:
                raise InvalidFile(
                    f"{self._store.paths[file.name]} is damaged: its checksum is wrong. {AGAIN}"
                )
        if (left_s := self._begun_s - monotonic()) > 0:
            logger.warning(
                "waiting %s: a write to %s that was lost with its connection may land yet",
                format_seconds(left_s),
                self._name,
            )
            sleep(left_s)
        table = encoded_table(files)
        self._lease.check()
        self._write(self._superblock.table_offset, table)
        self._device.flush()
        self._write_superblock(completed(self._superblock, table))

    def _write_extent(self, done: dict[int, int], extent: FileExtent) -> None:
        try:
            buffer = self._buffers.get_nowait()
        except queue.Empty:
            buffer = AlignedBuffer(self._extent_bytes)
        view = buffer.view()
        path = self._store.paths[self._plan.files[extent.file].name]
        try:
            with reading(path) as file:
                file.seek(extent.begin)
                done_bytes = 0
                while done_bytes < extent.size_bytes:
                    count = file.readinto(view[done_bytes : extent.size_bytes])
                    if not count:
                        end = extent.begin + done_bytes
                        raise InvalidFile(f"{path} was cut short: it ends at byte {end}. {AGAIN}")
                    done_bytes += count
        except OSError as error:
            raise cannot_open(path, error) from error
        stored_bytes = align_up(extent.size_bytes, self._block_bytes)
        view[extent.size_bytes : stored_bytes] = bytes(stored_bytes - extent.size_bytes)
        self._device.write(extent.offset, view[:stored_bytes])
        done[extent.number] = crc32c_at(buffer.address, extent.size_bytes)
        self._buffers.put(buffer)

    def _record_durable(self, extents: Sequence[FileExtent], done: Mapping[int, int]) -> None:
        record, size_bytes = self._record.view(), PROGRESS_RECORD_BYTES
        for number in (extent.number for extent in extents):
            encoded = encoded_progress(self._superblock, number, done[number])
            record[number * size_bytes : (number + 1) * size_bytes] = encoded
        begin = align_down(extents[0].number * size_bytes, self._block_bytes)
        end = align_up((extents[-1].number + 1) * size_bytes, self._block_bytes)
        self._device.write(self._superblock.progress_offset + begin, record[begin:end])

    def _write_superblock(self, superblock: Superblock) -> None:
        """One copy after the other: at any moment one of them holds."""
        for offset in reversed(SUPERBLOCK_OFFSETS):
            self._write(offset, superblock.encoded())
            self._device.flush()

    def _write(self, offset: int, data: bytes) -> None:
        buffer = AlignedBuffer(align_up(len(data), self._block_bytes))
        view = buffer.view()
        view[: len(data)] = data
        self._device.write(offset, view)
