"""penstock trains PyTorch models that do not fit in memory.

`offload` trains inside a byte budget; `trace`, `probe`, `plan` and `simulate` say beforehand what
will happen. The four values that pass between them are `Trace`, `Hardware`, `Plan` and `Timeline`.
`save` and `load` are checkpoints; `penstock.checkpoint` has more for them. `penstock.samples` stores training
data, and feeds it. `penstock.distributed` averages gradients of several processes in host memory.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.errors import (
    BudgetTooSmall,
    CheckpointError,
    DeviceUnavailable,
    DistributedError,
    InvalidArgument,
    InvalidCheckpoint,
    InvalidFile,
    InvalidPlan,
    InvalidSize,
    PenstockError,
    RankFailed,
    SampleError,
    SpillError,
    SpillSpaceFull,
)

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "penstock has not been tried without the GIL: take a Python that has it, such as python3.14 in place "
        "of python3.14t"
    )

# Everything else is imported at its first use: asking for help needs no numpy, planning and looking at files
# no torch.
if TYPE_CHECKING:
    from penstock import checkpoint as checkpoint
    from penstock import codecs as codecs
    from penstock import core as core
    from penstock import distributed as distributed
    from penstock import options as options
    from penstock import planners as planners
    from penstock import samples as samples
    from penstock import simulator as simulator
    from penstock import units as units
    from penstock.capture.best_batch import best_batch
    from penstock.capture.probe import probe
    from penstock.capture.tracer import fake_mode, trace
    from penstock.checkpoint import SaveHandle, load, save
    from penstock.core.check import check
    from penstock.core.hardware import Hardware
    from penstock.core.plan import Evict, Plan, Recompute
    from penstock.core.timeline import Timeline
    from penstock.core.trace import Trace
    from penstock.options import BatchOptions, IoOptions, PlanOptions, offload
    from penstock.planners import plan
    from penstock.runtime.open_runs import close
    from penstock.runtime.report import Report
    from penstock.runtime.run import Offload
    from penstock.simulator import simulate
else:
    _PACKAGES = (
        "checkpoint",
        "codecs",
        "core",
        "distributed",
        "options",
        "planners",
        "samples",
        "simulator",
        "units",
    )
    _MODULES = {
        "BatchOptions": "penstock.options",
        "Evict": "penstock.core.plan",
        "Hardware": "penstock.core.hardware",
        "IoOptions": "penstock.options",
        "Offload": "penstock.runtime.run",
        "Plan": "penstock.core.plan",
        "PlanOptions": "penstock.options",
        "Recompute": "penstock.core.plan",
        "Report": "penstock.runtime.report",
        "SaveHandle": "penstock.checkpoint",
        "Timeline": "penstock.core.timeline",
        "Trace": "penstock.core.trace",
        "best_batch": "penstock.capture.best_batch",
        "check": "penstock.core.check",
        "close": "penstock.runtime.open_runs",
        "fake_mode": "penstock.capture.tracer",
        "load": "penstock.checkpoint",
        "offload": "penstock.options",
        "plan": "penstock.planners",
        "probe": "penstock.capture.probe",
        "save": "penstock.checkpoint",
        "simulate": "penstock.simulator",
        "trace": "penstock.capture.tracer",
    }

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return import_module(f"penstock.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module 'penstock' has no attribute {name!r}")
        return globals().setdefault(name, getattr(import_module(_MODULES[name]), name))

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__version__ = "0.1.0"

__all__ = [
    "BatchOptions",
    "BudgetTooSmall",
    "CheckpointError",
    "DeviceUnavailable",
    "DistributedError",
    "Evict",
    "Hardware",
    "InvalidArgument",
    "InvalidCheckpoint",
    "InvalidFile",
    "InvalidPlan",
    "InvalidSize",
    "IoOptions",
    "Offload",
    "PenstockError",
    "Plan",
    "PlanOptions",
    "RankFailed",
    "Recompute",
    "Report",
    "SampleError",
    "SaveHandle",
    "SpillError",
    "SpillSpaceFull",
    "Timeline",
    "Trace",
    "best_batch",
    "check",
    "close",
    "fake_mode",
    "load",
    "offload",
    "plan",
    "probe",
    "save",
    "simulate",
    "trace",
]
