"""What options can be, and defaults, in literals: a command's help imports nothing else for them.

tests/cli/test_what_needs_no_torch_does_without.py compares them with what they stand for.
"""

from __future__ import annotations

# Keys of penstock.planners.POLICIES.
POLICIES = (
    "keep",
    "evict_all",
    "vdnn_all",
    "vdnn_conv",
    "flashneuron",
    "modnn",
    "g10",
    "optimal",
)
# Keys of penstock.capture.datasheets.DATA_SHEETS.
DATA_SHEETS = ("a100", "a100-80gb", "h100", "h200", "v100", "rtx4090")
# Keys of penstock.samples.sources.FORMATS.
FORMATS = ("folder", "webdataset", "tfrecord", "arrow", "mds", "arrays", "iterable")
# penstock.core.columns.LOSSY.
LOSSY = ("fp16", "bf16")
# penstock.samples.maintenance.inspection.CACHES, and penstock.samples.format.layout.CHUNK_BYTES.
CACHES = ("16MiB", "64MiB", "256MiB", "1GiB")
CHUNK_BYTES = 256 << 10
# Keys of penstock.integrations.finetune.DTYPES, and names that transformers.get_scheduler knows.
DTYPES = ("float32", "bfloat16")
SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")
