"""penstock trains PyTorch models that do not fit in memory.

`offload` trains inside a byte budget; `trace`, `probe`, `plan` and `simulate` say beforehand what
will happen. The four values that pass between them are `Trace`, `Hardware`, `Plan` and `Timeline`.
`save` and `load` are checkpoints; `penstock.checkpoint` has more for them. `penstock.samples` stores training
data, and feeds it.
"""

from penstock.capture.probe import probe
from penstock.capture.tracer import fake_mode, trace
from penstock.checkpoint import SaveHandle, load, save
from penstock.core.check import check
from penstock.core.hardware import Hardware
from penstock.core.plan import Evict, Plan, Recompute
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.errors import (
    BudgetTooSmall,
    CheckpointError,
    DeviceUnavailable,
    InvalidArgument,
    InvalidFile,
    InvalidPlan,
    InvalidSize,
    PenstockError,
    SampleError,
    SpillError,
    SpillSpaceFull,
)
from penstock.planners import plan
from penstock.runtime.report import Report
from penstock.runtime.run import Offload, offload
from penstock.simulator import simulate

__version__ = "0.1.0"

__all__ = [
    "BudgetTooSmall",
    "CheckpointError",
    "DeviceUnavailable",
    "Evict",
    "Hardware",
    "InvalidArgument",
    "InvalidFile",
    "InvalidPlan",
    "InvalidSize",
    "Offload",
    "PenstockError",
    "Plan",
    "Recompute",
    "Report",
    "SampleError",
    "SaveHandle",
    "SpillError",
    "SpillSpaceFull",
    "Timeline",
    "Trace",
    "check",
    "fake_mode",
    "load",
    "offload",
    "plan",
    "probe",
    "save",
    "simulate",
    "trace",
]
