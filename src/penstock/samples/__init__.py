"""The sample store: random access to millions of small samples at the speed of large reads (DLFS).

`pack` makes a store of almost anything; `mount` opens it. A `Store` gives single samples by name or
index, and whole epochs in a random order; `Loader` feeds them to PyTorch. `filtered`, `mapped`, `packed` and
`Mixture` make other samples of stores. `info`, `verify`, `unpack` and `bench` look after a store. `upload`
puts it onto a drive of another machine, which `discover` finds; `serve` lets others read it where it is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.samples.encoding import encode
from penstock.samples.epochs import merge_states
from penstock.samples.inspection import Bench, StoreInfo, bench, info
from penstock.samples.mixture import Mixture
from penstock.samples.order import Mixing, Segment, expected_mixing, mixing_of
from penstock.samples.packing import pack
from penstock.samples.remote.local import Upload
from penstock.samples.remote.serving import Served, Server, serve
from penstock.samples.remote.store import RemoteNamespace, discover
from penstock.samples.remote.upload import upload
from penstock.samples.sequences import Packed, document_mask, packed
from penstock.samples.store import Batch, Store, mount
from penstock.samples.unpacking import unpack
from penstock.samples.verification import Verification, verify
from penstock.samples.views import Filtered, Mapped, filtered, mapped

# What needs torch is imported at its first use: packing and looking at stores do without.
if TYPE_CHECKING:
    from penstock.samples.collective import pack_together
    from penstock.samples.loader import Loader, SampleDataset
else:
    _MODULES = {
        "Loader": "penstock.samples.loader",
        "SampleDataset": "penstock.samples.loader",
        "pack_together": "penstock.samples.collective",
    }

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'penstock.samples' has no attribute {name!r}")
        return globals().setdefault(name, getattr(import_module(_MODULES[name]), name))

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
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
