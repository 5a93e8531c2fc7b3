"""The commands that train, or trace training: what the user's script builds, from ``SCRIPT.py:build``, or a
language model on a text. Each returns an Answer; nothing is printed here but how it goes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import itertools
import logging
import os
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

import penstock
from penstock.cli.output import DONE, INTERRUPTED, SCRIPT, Answer, steps_progress, user_file_errors, writing
from penstock.core.hardware import Hardware
from penstock.core.memory_profile import minimum_bytes
from penstock.core.plan import Plan
from penstock.errors import InvalidArgument, PenstockError
from penstock.options import (
    FineTuneOptions,
    IoOptions,
    LoraOptions,
    PlanOptions,
    grouped,
    options_of,
    run_options,
)
from penstock.report import Record
from penstock.report.summary import Summary
from penstock.runtime.opening import PROBE_S, device_budget_bytes, host_bytes_of
from penstock.runtime.resident import default_spill_dir
from penstock.runtime.run import Offload
from penstock.units import counted, format_bytes, format_bytes_up, format_seconds

if TYPE_CHECKING:
    from penstock.integrations.finetune import FineTuning, Outcome

LossOf = Callable[[Any], torch.Tensor]

RETURNED: tuple[tuple[str, Any, str], ...] = (
    ("model", torch.nn.Module, "a torch.nn.Module"),
    ("optimizer", torch.optim.Optimizer, "a torch.optim.Optimizer"),
    ("batches", Iterable, "an iterable"),
    ("loss", Callable, "a function"),
)
WANTED = ", ".join(name for name, *_ in RETURNED)


class ScriptTraining(NamedTuple):
    """What a script builds. ``loss(model, batch)`` is the scalar to minimise."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterable[Any]
    loss: Callable[[torch.nn.Module, Any], torch.Tensor]

    def step(
        self, batch: Any, accumulate: Callable[[Any, LossOf], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """One iteration. Returns the loss, without its graph.

        accumulate   forward and backward of the batch in parts; None: it is not divided
        """
        if accumulate is None:
            loss = self.loss_of(batch)
            loss.backward()
        else:
            loss = accumulate(batch, self.loss_of)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def loss_of(self, batch: Any) -> torch.Tensor:
        loss = self.loss(self.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise InvalidArgument(f"loss(model, batch) returned {what}: let it return a scalar tensor")
        if not loss.requires_grad:
            raise InvalidArgument(
                "loss(model, batch) returned a tensor without a gradient: compute it from weights that "
                "train, outside of torch.no_grad() and without .detach()"
            )
        return loss


def load_script(script: str) -> Callable[[], ScriptTraining]:
    """The function that builds what ``SCRIPT.py:build`` says. The script's own errors pass through."""
    file, colon, name = script.rpartition(":")
    if not colon or not file or not name:
        raise InvalidArgument(f"{script!r} names no function: write SCRIPT.py:build")
    path = Path(file)
    if not path.is_file():
        raise InvalidArgument(f"there is no script {file}: give the path of a Python file, then :{name}")
    name_of_module = f"{SCRIPT}{path.stem}"  # its own name could hide a module of the same name
    spec = importlib.util.spec_from_file_location(name_of_module, path)
    if spec is None or spec.loader is None:
        raise InvalidArgument(f"{file} is not a Python file: its name has to end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name_of_module] = module  # dataclasses and pickle look it up
    sys.path.insert(0, str(path.parent.resolve()))  # as if the script were run itself
    spec.loader.exec_module(module)
    build = getattr(module, name, None)
    if not callable(build):
        raise InvalidArgument(f"{file} has no function {name}: define {name}() that returns ({WANTED})")
    try:
        inspect.signature(build).bind()
    except TypeError as error:
        raise InvalidArgument(f"{name}() in {file} is called without arguments: {error}") from error
    return lambda: _checked(build(), f"{name}() in {file}")


def _checked(built: Any, who: str) -> ScriptTraining:
    if not isinstance(built, tuple) or len(built) != 4:
        what = f"a tuple of {len(built)}" if isinstance(built, tuple) else f"a {type(built).__name__}"
        raise InvalidArgument(f"{who} returned {what}: return ({WANTED})")
    wrong = [
        f"{name} is a {type(value).__name__}, not {wanted}"
        for value, (name, kind, wanted) in zip(built, RETURNED, strict=True)
        if not isinstance(value, kind)
    ]
    if wrong:
        raise InvalidArgument(f"{who} returned something else: {'; '.join(wrong)}. Return ({WANTED})")
    return ScriptTraining(*built)


def first_batch(training: ScriptTraining) -> Any:
    for batch in training.batches:
        return batch
    raise InvalidArgument("batches is empty: give at least one batch")


def trace(options: Namespace) -> Answer:
    if options.real and options.device:
        raise InvalidArgument(
            "--device says whose times to estimate: leave it out with --real, which measures"
        )
    build = load_script(options.script)
    mode = contextlib.nullcontext() if options.real else penstock.fake_mode()
    with mode:
        training = build()
        batch = first_batch(training)
    device: Any = options.device or "cpu"
    if options.real:
        device = next((parameter.device for parameter in training.model.parameters()), "cpu")
    captured = penstock.trace(
        lambda: training.step(batch),
        fake=not options.real,
        device=str(device),
        mode=None if options.real else mode,
    )
    with writing(options.output):
        captured.save(options.output)
    names = ("kernels", "tensors", "persistent_bytes", "peak_bytes", "ideal_s", "measured")
    values = {name: getattr(captured, name) for name in names} | {"minimum_bytes": minimum_bytes(captured)}
    text = (
        f"{captured.kernels} kernels, {captured.tensors} tensors\n"
        f"weights and optimizer state {format_bytes(captured.persistent_bytes)}, "
        f"peak in memory {format_bytes(captured.peak_bytes)}, "
        f"smallest device budget {format_bytes_up(minimum_bytes(captured))}\n"
        f"step with everything in memory {format_seconds(captured.ideal_s)}, "
        f"{'measured' if captured.measured else 'estimated'}"
    )
    return Answer(values=values, shown=[text], written=[options.output])


def run(options: Namespace) -> Answer:
    with user_file_errors():
        hardware = Hardware.load(options.hardware) if options.hardware else None
        plan = Plan.load(options.plan) if options.plan else None
    build = load_script(options.script)
    losses: list[float] = []
    interrupted = False
    given = grouped({name: vars(options)[name] for name in run_options() if name in options})
    given |= {"plan": plan, "hardware": hardware}
    with new_folder(options.output), penstock.offload(**given) as offload:
        training = build()  # inside: it may be larger than the budget
        _check_device(training.model, options.device)
        try:
            for loss in _train(offload, training, options.steps):
                losses.append(loss)
        except KeyboardInterrupt:
            if not losses:
                raise
            interrupted = True  # what was measured so far is kept
        if not losses:
            raise InvalidArgument("batches is empty: give at least one batch")
        record = Record.of(offload)
        with user_file_errors(options.output):
            written = record.save(options.output)
    shown = [str(record.report), f"  loss {losses[0]:.4f} -> {losses[-1]:.4f}"]
    if options.steps is not None and len(losses) < options.steps and not interrupted:
        shown.append(f"only {len(losses)} of {options.steps} steps: batches is an iterator, and it ended")
    return Answer(
        values={
            "report": msgspec.to_builtins(record.report),
            "losses": losses,
            "folder": str(options.output),
        },
        shown=shown,
        written=written,
        exit_code=INTERRUPTED if interrupted else DONE,
    )


def _check_device(model: torch.nn.Module, wanted: str) -> None:
    found = {parameter.device.type for parameter in model.parameters()}
    if found - {torch.device(wanted).type}:
        raise InvalidArgument(f"the model is on {', '.join(sorted(found))}: say so with --device")


def _train(offload: Offload, training: ScriptTraining, steps: int | None) -> Iterator[float]:
    """Train, and yield the loss of each step."""
    total = steps if steps is not None else getattr(training.batches, "__len__", lambda: None)()
    divided = partial(offload.accumulate, blocks=training.model)
    with steps_progress("recording", total) as show, interrupts_deferred() as interrupted:
        for done, batch in enumerate(_batches(training.batches, steps), start=1):
            begun_s = time.perf_counter()
            with offload.step():
                loss = training.step(batch, divided if offload.micro_batch is not None else None)
            value = loss.item()
            step_s = time.perf_counter() - begun_s
            yield value
            show(done, value, partial(state_line, offload, step_s))
            if interrupted():
                raise KeyboardInterrupt


def _batches(batches: Iterable[Any], steps: int | None) -> Iterator[Any]:
    """One for each step: all of them again and again, but for an iterator, which can be read once."""
    if steps is None:
        yield from batches
        return
    given = 0
    while given < steps:
        before = given
        for batch in itertools.islice(batches, steps - given):
            given += 1
            yield batch
        if given == before or isinstance(batches, Iterator):
            return


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed; pressed again, it raises KeyboardInterrupt immediately.

    An exception amid a step could strike in a destructor, where Python drops it. Where SIGINT is ignored, as
    in a background job of a shell, it stays so.
    """
    pressed = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield pressed.is_set
        return

    def press(*_: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def state_line(offload: Offload, step_s: float) -> str:
    report = offload.report()
    resident = f", {format_bytes(report.peak_resident_bytes)} resident" if report.peak_resident_bytes else ""
    return (
        f"{format_seconds(step_s)} a step; peak {format_bytes(report.peak_bytes)} of "
        f"{format_bytes(report.device_budget_bytes)}{resident}; {format_bytes(report.evicted_bytes)} out, "
        f"{format_bytes(report.loaded_bytes)} in"
    )


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[None]:
    """Make the folder now, so that a run does not fail at its end; undo it where the run fails."""
    missing = list(itertools.takewhile(lambda folder: not folder.exists(), [path, *path.parents]))
    with user_file_errors():
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def finetune(options: Namespace) -> Answer:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    try:
        from penstock.integrations.finetune import FineTuning
    except ImportError as error:
        raise PenstockError(str(error)) from error
    _quiet()
    typed = vars(options)
    lora = LoraOptions(**{name: typed[f"lora_{name}"] for name in options_of(LoraOptions)})
    given = {name: typed[name] for name in options_of(FineTuneOptions)}
    settings = FineTuneOptions(**given | {"lora": lora if options.lora else None})
    with user_file_errors(), new_folder(options.output):
        tuning = FineTuning(settings, options.output, resume=options.resume)
        if tuning.is_finished:
            return _finished(tuning)
        spill_dirs = options.spill_dir or [default_spill_dir()]
        device = torch.device("cpu")
        host_bytes, node = host_bytes_of(device, options.host_budget, options.host_node), options.host_node
        hardware = (
            Hardware.load(options.hardware)
            if options.hardware
            else penstock.probe(
                spill_dirs, time_limit_s=PROBE_S, host_budget=host_bytes or None, host_node=node
            )
        )
        hardware = replace(hardware, host_bytes=host_bytes or 0)
        budget_bytes = device_budget_bytes(options.device_budget, device)
        planning = PlanOptions(policy=options.policy, recompute=options.recompute, compress=options.compress)
        predicted = tuning.predict(budget_bytes, hardware, planning, options.endurance)
        if not options.json:
            _show(predicted, tuning)
        with penstock.offload(
            device_budget=budget_bytes,
            spill_dir=spill_dirs,
            host_budget=host_bytes or None,
            host_node=node,
            disk_budget=options.disk_budget,
            hardware=hardware,
            io=IoOptions(endurance=options.endurance),
            planning=planning,
        ) as run:
            outcome = _tune(tuning, run, options.save_steps)
            report = run.report() if len(outcome.losses) > outcome.begun else None
    return _answer(tuning, outcome, predicted, report)


def _quiet() -> None:
    """What others say on the way would cut the bar in pieces."""
    from transformers.utils import logging as library

    library.disable_progress_bar()
    library.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # of every layer in 8 bits, in every step


def _show(predicted: Summary, tuning: FineTuning) -> None:
    """Before training begins, which takes long."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True, stderr=True)
    steps = counted(tuning.total_steps, "step")
    console.print(f"{steps} of {counted(tuning.settings.sequences_per_step, 'sequence')}, predicted:")
    for name, text in predicted.rows():
        console.print(f"  {name:<16} {text}")


def _tune(tuning: FineTuning, run: Offload, save_steps: int) -> Outcome:
    with steps_progress("reading", tuning.total_steps) as show, interrupts_deferred() as interrupted:
        begun_s = time.perf_counter()

        def on_step(steps: int, loss: float) -> bool:
            nonlocal begun_s
            now_s = time.perf_counter()
            show(steps, loss, partial(state_line, run, now_s - begun_s))
            begun_s = now_s
            return interrupted()

        return tuning.train(run, save_steps=save_steps, on_step=on_step)


def _answer(tuning: FineTuning, outcome: Outcome, predicted: Summary, report: Any) -> Answer:
    values = {
        "predicted": asdict(predicted),
        "report": msgspec.to_builtins(report) if report is not None else None,
        "losses": outcome.losses,
        "begun": outcome.begun,
        "total_steps": outcome.total,
        "finished": outcome.finished,
        "folder": str(tuning.folder),
    }
    shown: list[str] = [str(report)] if report is not None else []
    shown.append(_losses(outcome.losses, outcome.begun))
    if outcome.finished:
        return Answer(values=values, shown=shown, written=[tuning.model_folder], exit_code=DONE)
    shown.append(
        f"{len(outcome.losses)} of {outcome.total} steps are done: the same command goes on from there"
    )
    return Answer(values=values, shown=shown, written=[tuning.checkpoint], exit_code=INTERRUPTED)


def _finished(tuning: FineTuning) -> Answer:
    losses = tuning.losses()
    return Answer(
        values={"losses": losses, "finished": True, "folder": str(tuning.folder)},
        shown=[_losses(losses, len(losses)), f"finished already: the model is in {tuning.model_folder}"],
    )


def _losses(losses: list[float], begun: int) -> str:
    went_on = f", of which {begun} by earlier commands" if begun else ""
    if not losses:
        return ""
    return f"  loss {losses[0]:.4f} -> {losses[-1]:.4f} in {counted(len(losses), 'step')}{went_on}"
