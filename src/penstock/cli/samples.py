"""The commands on sample stores. Each returns an Answer; nothing is printed here but progress."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import chain, islice

from penstock.cli.output import (
    ERROR,
    Answer,
    Lines,
    Table,
    bytes_progress,
    printable,
    samples_progress,
    user_file_errors,
)
from penstock.samples import inspection, unpacking, verification
from penstock.samples.catalog import Directory, Names
from penstock.samples.inspection import StoreInfo, Throughput
from penstock.samples.manifest import StoreManifest
from penstock.samples.packing import pack as pack_source
from penstock.samples.places import PathLike, places_of
from penstock.samples.remote.serving import Server
from penstock.samples.remote.serving import serve as serve_store
from penstock.samples.remote.store import discover as discover_namespaces
from penstock.samples.remote.upload import upload as upload_store
from penstock.samples.sources import open_source
from penstock.units import counted, format_bytes, format_rate, format_seconds

LISTED_AT_ONCE = 4096
MOST_CLASSES = 20
MOST_DAMAGED = 50  # named for people; --json names all
OPTIONS = ("name_column", "label_column", "label_field", "prefix", "follow_links")


def pack(options: Namespace) -> Answer:
    given = {name: value for name in OPTIONS if (value := getattr(options, name)) not in (None, False)}
    paths = options.source[0] if len(options.source) == 1 else options.source
    source = open_source(paths, format=options.format, **given)
    samples, size_bytes = (source.samples, source.size_bytes) if options.world_size == 1 else (None, None)
    with _resumable(), samples_progress("packed", samples, size_bytes, quiet=options.json) as progress:
        manifest = pack_source(
            source,
            options.destination,
            options.chunk_bytes,
            rank=options.rank,
            world_size=options.world_size,
            resume=not options.no_resume,
            overwrite=options.overwrite,
            staging=options.staging,
            progress=progress,
        )
    number, count = manifest.partition, manifest.partitions
    partition = f", partition {number} of {count}" if count > 1 else ""
    chunks = _chunks(manifest.chunks, manifest.chunk_bytes)
    said = f"{manifest.samples:,} samples, {format_bytes(manifest.size_bytes)}, in {chunks}{partition}"
    names = (
        "samples",
        "size_bytes",
        "chunks",
        "chunk_bytes",
        "encoding",
        "classes",
        "partition",
        "partitions",
    )
    values = {name: getattr(manifest, name) for name in names}
    return Answer(values=values, shown=[said], written=[options.destination])


@contextlib.contextmanager
def _resumable() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print("penstock: the same command goes on where this one was stopped", file=sys.stderr)
        raise


def upload(options: Namespace) -> Answer:
    with _resumable(), bytes_progress("uploaded", quiet=options.json) as progress:
        done = upload_store(options.store, options.url, overwrite=options.overwrite, progress=progress)
    said = f"{done.samples:,} samples, {format_bytes(done.size_bytes)} in {done.files} files"
    if not done.written_bytes:
        said += ", which were there already"
    elif done.written_bytes < done.size_bytes:
        said += f", of which {format_bytes(done.written_bytes)} were not there yet"
    written = [done.url] if done.written_bytes else []
    return Answer(values=dataclasses.asdict(done), shown=[said], written=written)


def serve(options: Namespace) -> Answer:
    server = serve_store(options.store, options.listen)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends as by Ctrl-C

    def go_on() -> None:
        try:
            _serve_on(server, quiet=options.json)
        finally:
            signal.signal(signal.SIGTERM, before)

    shown = [
        f"{options.store}: {server.samples:,} samples, served on {server.portal} until Ctrl-C or SIGTERM",
        f"mount it by {server.url}",
    ]
    shown += ["peers have to show the key"] if server.asks else []
    values = {"url": server.url, "portal": str(server.portal), "samples": server.samples, "pid": os.getpid()}
    return Answer(values=values, shown=shown, go_on=go_on)


def _serve_on(server: Server, *, quiet: bool) -> None:
    with server:
        with contextlib.suppress(KeyboardInterrupt):
            server.wait()
        done = server.served()
    if not quiet:
        refused = f"; {done.refused_writes:,} writes were refused" if done.refused_writes else ""
        broken = f"; {counted(done.violations, 'peer')} broke the protocol" if done.violations else ""
        denied = f"; {counted(done.denied, 'connection')} did not show the key" if done.denied else ""
        print(f"served {format_bytes(done.read_bytes)} in {done.reads:,} reads{refused}{broken}{denied}")


def discover(options: Namespace) -> Answer:
    found = discover_namespaces(options.portal)
    values = {"namespaces": [dataclasses.asdict(each) for each in found]}
    if not found:
        return Answer(values=values, shown=[f"{options.portal} has nothing for this host"])
    rows = [
        (
            printable(each.url),
            "" if each.size_bytes is None else format_bytes(each.size_bytes),
            "" if each.block_bytes is None else f"{each.block_bytes} B",
            printable(each.holds),
        )
        for each in found
    ]
    notes = [f"{printable(each.url)}: {printable(each.problem)}" for each in found if each.problem]
    return Answer(values=values, shown=[Table(("namespace", "size", "block", "holds"), rows, notes=notes)])


def ls(options: Namespace) -> Answer:
    listed = islice(_listed(options.store, options.pattern), options.limit)
    if options.json:
        fields = ("index", "name", "size_bytes", "class")
        return Answer(values={"samples": [dict(zip(fields, sample, strict=True)) for sample in listed]})
    if options.long:
        lines = (
            f"{index:>10} {size_bytes:>12} {'' if label is None else printable(label):<16} {printable(name)}"
            for index, name, size_bytes, label in listed
        )
        header = f"{'index':>10} {'bytes':>12} {'class':<16} name"
        return Answer(values={}, shown=[Lines(chain([header], lines))])
    return Answer(values={}, shown=[Lines(printable(name) for _, name, _, _ in listed)])


def _listed(path: PathLike, pattern: str | None) -> Iterator[tuple[int, str, int, str | None]]:
    """Index, name, size and class of the samples whose name fits the pattern."""
    directories = [Directory.load(place) for place in places_of(path)]
    rest = zip(Names(directories), chain.from_iterable(map(_sizes_and_classes, directories)), strict=True)
    for index, (name, (size_bytes, label)) in enumerate(rest):
        if pattern is None or fnmatchcase(name, pattern):
            yield index, name, size_bytes, label


def _sizes_and_classes(directory: Directory) -> Iterator[tuple[int, str | None]]:
    classes = directory.manifest.classes
    for begin in range(0, directory.manifest.samples, LISTED_AT_ONCE):
        sizes = directory.located(slice(begin, begin + LISTED_AT_ONCE))[1].tolist()
        labels = [-1] * len(sizes)
        if directory.labels is not None:
            labels = directory.labels[begin : begin + LISTED_AT_ONCE].tolist()
        for size_bytes, label in zip(sizes, labels, strict=True):
            yield size_bytes, classes[label] if 0 <= label < len(classes) else None


def info(options: Namespace) -> Answer:
    found = inspection.info(options.store, cache_bytes=options.cache, batch=options.batch)
    shown: list[str | Lines | Table] = [_summary(found)]
    shown += [f"{printable(key)}: {printable(value)}" for key, value in found.metadata.items()]
    if found.sizes is not None:
        shown.append(_size_table(found))
    if found.fields:
        rows = [
            (field.name, field.dtype, " x ".join(map(str, field.shape)) or "scalar") for field in found.fields
        ]
        shown.append(Table(("field", "type", "shape"), rows))
    if found.classes:
        shown.append(_class_table(found))
    if found.mixing:
        shown.append(_mixing_table(found))
    return Answer(values=dataclasses.asdict(found), shown=shown)


def _summary(found: StoreInfo) -> str:
    what = {"raw": "bytes", "record": "fields of fixed size", "msgpack": "fields"}.get(
        found.encoding, found.encoding
    )
    partitions = f", in {found.partitions} partitions" if found.partitions > 1 else ""
    source = f", packed from {printable(found.source)}" if found.source else ""
    share = found.overhead_bytes / max(found.size_bytes, 1)
    overhead = format_bytes(found.overhead_bytes) + (f", {share:.2%} of that" if share < 1 else "")
    edges = found.edges / max(found.samples, 1)
    chunks = _chunks(found.chunks, found.chunk_bytes)
    lines = (
        f"{printable(found.path)}: {found.samples:,} samples, {format_bytes(found.size_bytes)}"
        f"{partitions}{source}",
        f"samples are {what}; {chunks} in {counted(found.data_files, 'data file')}",
        f"directory, names, sums and padding take {overhead}",
        f"{found.edges:,} samples ({edges:.1%}) cross the end of their chunk; {found.long_edges:,} of them "
        "are read by themselves",
    )
    return "\n".join(lines)


def _chunks(chunks: int, chunk_bytes: int) -> str:
    return f"{counted(chunks, 'chunk')} of {format_bytes(chunk_bytes)}"


def _size_table(found: StoreInfo) -> Table:
    assert found.sizes is not None
    rows = []
    for size in found.sizes.ranges:
        span = f"{format_bytes(size.begin_bytes)} to {format_bytes(size.end_bytes)}"
        share = size.samples / found.samples
        rows.append((span if size.begin_bytes else "0 B", f"{size.samples:,}", f"{share:.1%}"))
    quantiles = ", ".join(f"{share:.0%} {format_bytes(size)}" for share, size in found.sizes.quantiles)
    notes = [
        f"smallest {format_bytes(found.sizes.smallest_bytes)}, mean {format_bytes(found.sizes.mean_bytes)}, "
        f"largest {format_bytes(found.sizes.largest_bytes)}",
        f"so many samples are at most so large: {quantiles}",
    ]
    return Table(("size of a sample", "samples", "share"), rows, notes=notes)


def _class_table(found: StoreInfo) -> Table:
    shown = found.classes[:MOST_CLASSES]
    rows = [("(none)" if one.name is None else printable(one.name), f"{one.samples:,}") for one in shown]
    more = len(found.classes) - len(shown)
    return Table(("class", "samples"), rows, notes=[f"and {more} more"] if more else ())


def _mixing_table(found: StoreInfo) -> Table:
    rows = []
    for row in found.mixing:
        mixing = row.mixing
        rows.append(
            (
                row.order,
                "" if row.cache_bytes is None else format_bytes(row.cache_bytes),
                "" if row.slots is None else f"{row.slots:,}",
                f"{mixing.chunks:.1f} of {mixing.ideal_chunks:.1f}",
                f"{mixing.ratio:.1%}",
                f"{mixing.groups:.1f} of {mixing.ideal_groups:.1f}",
                f"{mixing.displacement:.3f} of {mixing.ideal_displacement:.3f}",
            )
        )
    mixing = found.mixing[0].mixing
    notes = [
        f"chunks that a batch of {mixing.batch_size} draws from, against a full shuffle; the same of "
        f"{mixing.of_groups} equal ranges of the store;",
        "and how far samples move from their stored order, as a share of the store",
    ]
    columns = ("order", "cache", "chunks mixed", "chunks a batch", "mixing", "ranges a batch", "moved by")
    return Table(columns, rows, notes=notes)


def verify(options: Namespace) -> Answer:
    manifests = _manifests(options.store)
    padded_bytes = sum(manifest.chunks * manifest.chunk_bytes for manifest in manifests)
    samples = sum(manifest.samples for manifest in manifests)
    with samples_progress("verified", samples, padded_bytes, quiet=options.json) as progress:
        found = verification.verify(options.store, progress)
    values = {**dataclasses.asdict(found), "sound": found.sound}
    summary = f"{printable(found.path)}: {found.samples:,} samples, {format_bytes(found.size_bytes)}"
    if found.sound:
        said = "every checksum is right, and directory, names and look-up agree"
        return Answer(values=values, shown=[summary, said])
    shown = [summary, *found.problems[:MOST_DAMAGED]]
    if more := len(found.problems) - MOST_DAMAGED:
        shown += [f"and {more} more problems"] if more > 0 else []
    for damaged in found.damaged[:MOST_DAMAGED]:
        name = "" if damaged.name is None else f", {printable(damaged.name)}"
        shown.append(f"sample {damaged.index}{name}: its bytes are damaged")
    if (more := len(found.damaged) - MOST_DAMAGED) > 0:
        shown.append(f"and {more} more samples")
    if not found.complete:
        shown.append("samples could not all be compared")
    verdict = f"the store is damaged: {len(found.damaged):,} of {found.samples:,} samples, "
    verdict += f"{len(found.problems)} other problems. Copy or pack it again"
    return Answer(values=values, shown=[*shown, verdict], exit_code=ERROR)


def _manifests(path: PathLike) -> list[StoreManifest]:
    with user_file_errors():
        return [place.manifest() for place in places_of(path)]


def unpack(options: Namespace) -> Answer:
    names = options.names or None
    total = len(names or ()) or sum(manifest.samples for manifest in _manifests(options.store))
    with samples_progress("unpacked", total, None, quiet=options.json) as progress:
        samples = unpacking.unpack(
            options.store,
            options.destination,
            names,
            flat=options.flat,
            overwrite=options.overwrite,
            progress=progress,
        )
    return Answer(values={"samples": samples}, shown=[f"{samples:,} samples"], written=[options.destination])


def bench(options: Namespace) -> Answer:
    found = inspection.bench(
        options.store,
        seconds=options.time_limit,
        cache_bytes=options.cache,
        batch=options.batch,
        io=options.io,
        cold=options.cold,
    )
    rows = [_throughput_row(row) for row in found.rows]
    notes = [
        f"{found.io} reads, batches of {options.batch}, a cache of {format_bytes(options.cache)}, "
        f"{options.time_limit / len(rows):.1f} s for each row"
    ]
    columns = ("read by", "a sample", "samples/s", "rate", "first batch", "page cache before", "mixing")
    table = Table(columns, rows, notes=notes)
    return Answer(values=dataclasses.asdict(found), shown=[table])


def _throughput_row(row: Throughput) -> tuple[str, ...]:
    return (
        row.way,
        format_seconds(row.sample_s),
        f"{1 / row.sample_s:,.0f}",
        format_rate(row.rate_bytes_per_s),
        format_seconds(row.first_s),
        "" if row.cached is None else f"{row.cached:.0%}",
        "" if row.mixing is None else f"{row.mixing:.0%}",
    )
