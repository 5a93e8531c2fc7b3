"""The sample store: random access to millions of small samples at the speed of large reads (DLFS).

`pack` makes a store of almost anything; `mount` opens it. A `Store` gives single samples by name or
index, and whole epochs in a random order; `Loader` feeds them to PyTorch. `info`, `verify`, `unpack` and
`bench` look after a store.
"""

from penstock.samples.encoding import encode
from penstock.samples.mixing import Mixing, expected_mixing, mixing_of
from penstock.samples.mounted.batch import Batch
from penstock.samples.mounted.collective import pack_together
from penstock.samples.mounted.store import Store, mount
from penstock.samples.order import Segment
from penstock.samples.packing.pack import pack
from penstock.samples.training.loader import Loader, SampleDataset
from penstock.samples.training.resume import merge_states
from penstock.samples.upkeep.inspection import StoreInfo, info
from penstock.samples.upkeep.throughput import Bench, bench
from penstock.samples.upkeep.unpacking import unpack
from penstock.samples.upkeep.verification import Verification, verify

__all__ = [
    "Batch",
    "Bench",
    "Loader",
    "Mixing",
    "SampleDataset",
    "Segment",
    "Store",
    "StoreInfo",
    "Verification",
    "bench",
    "encode",
    "expected_mixing",
    "info",
    "merge_states",
    "mixing_of",
    "mount",
    "pack",
    "pack_together",
    "unpack",
    "verify",
]
