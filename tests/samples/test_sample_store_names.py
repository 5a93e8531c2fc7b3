"""The names of the sample store that programs rely on are there, as they were."""

from __future__ import annotations

import inspect

import pytest

from penstock import samples
from penstock.errors import InvalidArgument, SampleError

PUBLIC = [
    "Batch",
    "Bench",
    "Filtered",
    "Loader",
    "Mapped",
    "Mixing",
    "Mixture",
    "Packed",
    "RemoteNamespace",
    "SampleDataset",
    "Segment",
    "Served",
    "Server",
    "Store",
    "StoreInfo",
    "Upload",
    "Verification",
    "bench",
    "discover",
    "document_mask",
    "encode",
    "expected_mixing",
    "filtered",
    "info",
    "mapped",
    "merge_states",
    "mixing_of",
    "mount",
    "pack",
    "pack_together",
    "packed",
    "serve",
    "unpack",
    "upload",
    "verify",
]

# What can be given by position, and what has to be named. "=" marks a default.
SIGNATURES = {
    "pack": (["source", "dest", "chunk_bytes="], ["rank=", "world_size="]),
    "mount": (
        ["path", "order=", "cache_bytes=", "rank=", "world_size="],
        ["group=", "served_at=", "io=", "verify=", "on_damage=", "prefetch_bytes=", "timeout_s="],
    ),
    "serve": (["path", "listen="], []),
    "upload": (["store", "url"], ["overwrite=", "progress=", "timeout_s="]),
    "discover": (["portal", "timeout_s="], []),
    "Store.sequence": (["self"], ["seed=", "epoch=", "after=", "replica=", "replicas=", "skip="]),
    "Store.bread": (["self", "n"], []),
    "Store.read": (["self", "key"], []),
    "Store.names": (["self"], []),
    "Store.close": (["self"], []),
    "Mixture": (["sources"], ["samples_per_epoch="]),
    "packed": (["store", "block", "tokens"], ["window=", "pad="]),
    "filtered": (["store", "keep"], []),
    "mapped": (["source", "function"], []),
    "Loader": (["store", "batch_size"], ["decode=", "decode_batch=", "collate_fn=", "seed=", "drop_last="]),
}


def test_the_public_names() -> None:
    assert list(samples.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(samples, name).__doc__, f"{name} says what it is"


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    found: object = samples
    for part in name.split("."):
        found = getattr(found, part)
    by_position, by_name = [], []
    for parameter in inspect.signature(found).parameters.values():  # type: ignore[arg-type]
        text = parameter.name + ("" if parameter.default is parameter.empty else "=")
        (by_name if parameter.kind is parameter.KEYWORD_ONLY else by_position).append(text)
    expected_by_position, expected_by_name = SIGNATURES[name]
    assert by_position == expected_by_position
    assert by_name[: len(expected_by_name)] == expected_by_name
    assert all(extra.endswith("=") for extra in by_name)


def test_a_name_means_one_thing_in_mount_and_loader() -> None:
    mounting, loading = (inspect.signature(each).parameters for each in (samples.mount, samples.Loader))
    assert not mounting.keys() & loading.keys()


def test_defaults() -> None:
    mount = inspect.signature(samples.mount).parameters
    assert {name: mount[name].default for name in ("order", "rank", "world_size", "verify", "on_damage")} == {
        "order": "chunk",
        "rank": 0,
        "world_size": 1,
        "verify": True,
        "on_damage": "raise",
    }


def test_a_batch_has_what_programs_read() -> None:
    for name in ("indices", "data", "offsets", "labels", "names", "decoded", "__len__", "__getitem__"):
        assert hasattr(samples.Batch, name) or name in samples.Batch.__annotations__


def test_what_goes_wrong_can_be_caught() -> None:
    assert issubclass(SampleError, OSError)
    with pytest.raises(SampleError, match="Give the folder of a store"):
        samples.mount("/there/is/nothing/here")
    with pytest.raises(InvalidArgument):
        samples.mount("/there/is/nothing/here", order="sideways")
