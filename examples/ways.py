"""The same training several ways, each in a process of its own that waits to be told to step.

A process of its own keeps one way's memory apart from another's; being told step by step lets ways
alternate, so that what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import gpt
import torch
from torch import Tensor, nn

import penstock
from penstock.report.record import Record
from penstock.runtime import resident

# The first steps are slow everywhere: memory is touched for the first time, plans are made.
UNSETTLED_STEPS = 4


@dataclass(frozen=True)
class Job:
    """What a process is to do.

    way                   a key of WAYS
    device_budget_bytes   for penstock
    hardware_file         for penstock, what `penstock probe` wrote
    record_folder         for penstock, where to leave the record of the run; none when empty
    spill_dir             for those that write files; the system's choice when empty
    """

    way: str
    config: gpt.Config = field(default_factory=gpt.Config)
    device_budget_bytes: int = 0
    hardware_file: str = ""
    record_folder: str = ""
    spill_dir: str = ""


@dataclass(frozen=True)
class Step:
    """One step: its time, and its loss to the last bit."""

    step_s: float
    loss_hex: str

    @property
    def loss(self) -> float:
        return float.fromhex(self.loss_hex)


@dataclass(frozen=True)
class Result:
    """What a process found out.

    peak_resident_bytes   most resident bytes, less those before the model was built
    weights_sha256        of all weights, to the last bit
    """

    steps: tuple[Step, ...]
    peak_resident_bytes: int
    weights_sha256: str

    @property
    def settled_s(self) -> list[float]:
        """Seconds of the steps after the first ones."""
        return [step.step_s for step in self.steps[UNSETTLED_STEPS:]]

    def same_bits(self, other: Result) -> bool:
        """Whether every loss and every weight is equal."""
        losses = [[step.loss_hex for step in result.steps] for result in (self, other)]
        return losses[0] == losses[1] and self.weights_sha256 == other.weights_sha256


class Worker:
    """A process that trains one way. A context manager.

    Raises RuntimeError where the process fails; its own error is on standard error.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._steps: list[Step] = []
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which ends its workers
        )
        self._send(asdict(job))

    def step(self) -> Step:
        """Let it train one step, and wait for that."""
        self._send({"do": "step"})
        self._steps.append(Step(**self._receive()))
        return self._steps[-1]

    def finish(self) -> Result:
        """End the training. No step can follow."""
        self._send({"do": "finish"})
        return Result(tuple(self._steps), **self._receive())

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it died of, `_receive` says
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.job.way}: the process ended with exit code {self._process.wait()}")
        message: dict[str, Any] = json.loads(line)
        return message

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.terminate()
        self._process.communicate()


# -- the ways --------------------------------------------------------------------------------------

Around = Callable[[], AbstractContextManager[Any]]  # what stands around a step


@contextlib.contextmanager
def _plain(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Around]:
    yield contextlib.nullcontext


@contextlib.contextmanager
def _penstock(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Around]:
    hardware = penstock.Hardware.load(job.hardware_file)
    with penstock.offload(
        model,
        optimizer,
        device_budget=job.device_budget_bytes,
        spill_dir=job.spill_dir or None,
        hardware=hardware,
    ) as run:
        yield run.step
        if job.record_folder:
            Record.of(run).save(job.record_folder)


class _File:
    """A saved tensor in a file of its own, removed with this object."""

    def __init__(self, folder: str, tensor: Tensor) -> None:
        self.path = Path(folder) / uuid.uuid4().hex
        torch.save(tensor, self.path)

    def load(self) -> Tensor:
        return torch.load(self.path)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


@contextlib.contextmanager
def _files(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Around]:
    """What PyTorch's tutorial on saved-tensor hooks does; weights stay where they are."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor | _File:
        if tensor.numel() < 1000 or tensor.untyped_storage().data_ptr() in weights:
            return tensor
        return _File(folder, tensor)

    def unpack(packed: Tensor | _File) -> Tensor:
        return packed.load() if isinstance(packed, _File) else packed

    with tempfile.TemporaryDirectory(dir=job.spill_dir or None) as folder:
        yield lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack)


WAYS = {
    "in memory": _plain,
    "checkpoint": _plain,  # the model does it itself
    "penstock": _penstock,
    "files": _files,
}


# -- in the process --------------------------------------------------------------------------------


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor) -> Tensor:
    loss = gpt.loss(model, text)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trace_of(config: gpt.Config) -> penstock.Trace:
    """The step as it would be in memory. Nothing is allocated."""
    mode = penstock.fake_mode()
    with mode:
        model, optimizer, batches, _ = gpt.build(config)
        text = next(batches)
    return penstock.trace(lambda: train_step(model, optimizer, text), mode=mode)


def _warm_up() -> None:
    """Load the code that training needs before memory is measured: it is the same for every way."""
    import torch._dynamo  # noqa: F401  what creating an optimizer loads

    small = gpt.Config(layers=1, width=16, heads=2, context=8, batch=2, checkpoint=True)
    model, optimizer, batches, _ = gpt.build(small)
    train_step(model, optimizer, next(batches))


def _serve() -> None:
    job = json.loads(sys.stdin.readline())
    job = Job(**{**job, "config": gpt.Config(**job["config"])})
    _warm_up()
    resident.release_free_memory()
    before_bytes = resident.resident_bytes()
    resident.reset_peak()
    config = replace(job.config, checkpoint=job.way == "checkpoint")
    model, optimizer, batches, _ = gpt.build(config)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    with WAYS[job.way](job, model, optimizer) as around:
        while json.loads(sys.stdin.readline() or '{"do": "finish"}')["do"] == "step":
            text = next(batches)
            begun_s = time.perf_counter()
            with around():
                loss = train_step(model, optimizer, text)
            step = Step(time.perf_counter() - begun_s, loss.item().hex())
            print(json.dumps(asdict(step)), file=answers, flush=True)
        peak_bytes = resident.peak_resident_bytes() - before_bytes
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    result = {"peak_resident_bytes": peak_bytes, "weights_sha256": digest.hexdigest()}
    print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
