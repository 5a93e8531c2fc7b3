"""The same training by several methods, each in a process of its own that waits to be told to step.

A process of its own keeps one method's memory apart from another's; being told step by step lets methods
alternate, so that what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
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
from types import ModuleType, TracebackType
from typing import Any

import gpt
import msgspec
import torch
from torch import Tensor, nn

import penstock
from penstock.report import Record
from penstock.runtime import resident
from penstock.runtime.report import Report
from penstock.runtime.run import Offload

# The first steps are slow everywhere: memory is touched for the first time, and penstock records and plans
# the first one, which creates the optimizer's state, and the next four.
UNSETTLED_STEPS = 5


@dataclass(frozen=True)
class Job:
    """What a process is to do.

    method                a key of METHODS
    config                of the program
    program               a Python file that has a class `Config` and a function `build(config)`, which gives
                          (model, optimizer, batches, loss)
    device_budget_bytes   for penstock
    host_budget_bytes     for penstock, of memory beside that as a tier; 0 for none
    planning              for penstock, arguments of PlanOptions
    hardware_file         for penstock, what `penstock probe` wrote
    record_folder         for penstock, where to leave the record of the run; none when empty
    spill_dir             for those that write files; the system's choice when empty
    control_group         directory of a control group to run in; none when empty
    hash_state            of weights and the optimizer's state, at the end
    """

    method: str
    config: Any = field(default_factory=gpt.Config)
    program: str = gpt.__file__
    device_budget_bytes: int = 0
    host_budget_bytes: int = 0
    planning: dict[str, Any] = field(default_factory=dict)
    hardware_file: str = ""
    record_folder: str = ""
    spill_dir: str = ""
    control_group: str = ""
    hash_state: bool = True


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
    state_sha256          of all weights and the optimizer's state, to the last bit
    report                penstock's own; None for other methods
    """

    steps: tuple[Step, ...]
    peak_resident_bytes: int
    state_sha256: str
    report: Report | None

    @property
    def settled_s(self) -> list[float]:
        """Seconds of the steps after the first ones."""
        return [step.step_s for step in self.steps[UNSETTLED_STEPS:]]

    def same_bits(self, other: Result) -> bool:
        """Whether every loss, every weight and all of the optimizer's state is equal."""
        losses = [[step.loss_hex for step in result.steps] for result in (self, other)]
        return losses[0] == losses[1] and self.state_sha256 == other.state_sha256


class Worker:
    """A process that trains by one method. A context manager.

    Raises RuntimeError where the process fails; its own error is on standard error.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._steps: list[Step] = []
        self._is_loaded = self._is_built = False
        command = [sys.executable, __file__]
        if job.control_group:  # the whole process, from its first byte on
            members = str(Path(job.control_group) / "cgroup.procs")
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', members, *command]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which ends its workers
        )
        self._send(asdict(job))

    def build(self) -> None:
        """Wait until its code is loaded, and let it build the model. `step` does so too."""
        if not self._is_loaded:
            self.wait_until_loaded()
        self._send({"do": "build"})
        self._is_built = True

    def wait_until_loaded(self) -> None:
        """Python, torch and all code are loaded then, and nothing of the training is in memory."""
        if self._receive() != {"loaded": True}:
            raise RuntimeError(f"{self.job.method}: the process did not say that it is ready")
        self._is_loaded = True

    def step(self) -> Step:
        """Let it train one step, and wait for that."""
        if not self._is_built:
            self.build()
        self._send({"do": "step"})
        self._steps.append(Step(**self._receive()))
        return self._steps[-1]

    def finish(self) -> Result:
        """End the training. No step can follow."""
        self._send({"do": "finish"})
        answer = self._receive()
        if answer["report"] is not None:
            answer["report"] = msgspec.convert(answer["report"], Report)
        return Result(tuple(self._steps), **answer)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it died of, `_receive` says
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.job.method}: the process ended with exit code {self._process.wait()}")
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


# -- the methods -----------------------------------------------------------------------------------

Around = Callable[[], AbstractContextManager[Any]]  # what stands around a step


class Method:
    """How memory is managed. Around the building of the model and all of the training.

    around   makes what stands around a step
    run      penstock's; None for other methods
    """

    around: Around = contextlib.nullcontext
    run: Offload | None = None

    def know(self, model: nn.Module) -> None:
        """The model is built."""


@contextlib.contextmanager
def _plain(job: Job) -> Iterator[Method]:
    yield Method()


@contextlib.contextmanager
def _penstock(job: Job) -> Iterator[Method]:
    hardware = penstock.Hardware.load(job.hardware_file) if job.hardware_file else None
    with penstock.offload(
        device_budget=job.device_budget_bytes,
        host_budget=job.host_budget_bytes or None,
        spill_dir=job.spill_dir or None,
        planning=penstock.PlanOptions(**job.planning),
        hardware=hardware,
    ) as run:
        method = Method()
        method.around, method.run = run.step, run
        yield method
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


class _Files(Method):
    """What PyTorch's tutorial on saved-tensor hooks does; weights stay where they are."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._weights: set[int] = set()
        self.around = lambda: torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def know(self, model: nn.Module) -> None:
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def _pack(self, tensor: Tensor) -> Tensor | _File:
        if tensor.numel() < 1000 or tensor.untyped_storage().data_ptr() in self._weights:
            return tensor
        return _File(self._folder, tensor)

    def _unpack(self, packed: Tensor | _File) -> Tensor:
        return packed.load() if isinstance(packed, _File) else packed


@contextlib.contextmanager
def _files(job: Job) -> Iterator[Method]:
    with tempfile.TemporaryDirectory(dir=job.spill_dir or None) as folder:
        yield _Files(folder)


METHODS: dict[str, Callable[[Job], AbstractContextManager[Method]]] = {
    "in memory": _plain,
    "checkpoint": _plain,  # the model does it itself
    "penstock": _penstock,
    "files": _files,
}


# -- in the process --------------------------------------------------------------------------------


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, Any], Tensor],
    batch: Any,
) -> Tensor:
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trace_of(config: Any, build: Callable[[Any], Any] = gpt.build) -> penstock.Trace:
    """The step as it would be in memory. Nothing is allocated."""
    mode = penstock.fake_mode()
    with mode:
        model, optimizer, batches, loss = build(config)
        batch = next(batches)
    return penstock.trace(lambda: train_step(model, optimizer, loss, batch), mode=mode)


def _warm_up() -> None:
    """Load the code that training needs before memory is measured: it is the same for every method."""
    import torch._dynamo  # noqa: F401  what creating an optimizer loads

    small = gpt.Config(layers=1, width=16, heads=2, context=8, batch=2, checkpoint=True)
    model, optimizer, batches, loss = gpt.build(small)
    train_step(model, optimizer, loss, next(batches))


def _load(program: str) -> ModuleType:
    path = Path(program)
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


def _tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for parameter in model.parameters():
        yield parameter.detach()
        for value in optimizer.state[parameter].values():
            if isinstance(value, Tensor):
                yield value


def state_sha256(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all weights and the optimizer's state, to the last bit."""
    found = hashlib.sha256()
    for tensor in _tensors_of(model, optimizer):
        found.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def _serve() -> None:
    received = json.loads(sys.stdin.readline())
    program = _load(received["program"])
    job = Job(**{**received, "config": program.Config(**received["config"])})
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    def told() -> str:
        return str(json.loads(sys.stdin.readline() or '{"do": "finish"}')["do"])

    _warm_up()
    answer({"loaded": True})
    if told() != "build":
        return
    resident.release_free_memory()
    before_bytes = resident.resident_bytes()
    resident.reset_peak()
    config = replace(job.config, checkpoint=True) if job.method == "checkpoint" else job.config
    with METHODS[job.method](job) as method:
        model, optimizer, batches, loss_of = program.build(config)
        method.know(model)
        while told() == "step":
            batch = next(batches)
            begun_s = time.perf_counter()
            with method.around():
                loss = train_step(model, optimizer, loss_of, batch)
            answer(asdict(Step(time.perf_counter() - begun_s, loss.item().hex())))
        result = {
            "peak_resident_bytes": resident.peak_resident_bytes() - before_bytes,
            "report": msgspec.to_builtins(method.run.report()) if method.run is not None else None,
        }
        state = state_sha256(model, optimizer) if job.hash_state else ""
    answer({**result, "state_sha256": state})


if __name__ == "__main__":
    _serve()
