"""`penstock finetune`: predict, train a language model on a text, show how it goes, and write the model."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

import penstock
from penstock.cli.output import DONE, INTERRUPTED, Answer, own_files
from penstock.cli.progress import steps_progress
from penstock.cli.training import interrupts_noted, new_folder, state_line
from penstock.core.hardware import Hardware
from penstock.errors import PenstockError
from penstock.report.summary import Summary
from penstock.runtime.resident import default_spill_dir
from penstock.runtime.run import PROBE_S, Offload
from penstock.units import counted

if TYPE_CHECKING:
    from penstock.integrations.finetune import FineTuning, Outcome


def finetune(options: Namespace) -> Answer:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    try:
        from penstock.integrations.finetune import FineTuning, Lora, Settings
    except ImportError as error:
        raise PenstockError(str(error)) from error
    _quiet()
    lora = Lora(
        r=options.lora_r,
        alpha=options.lora_alpha,
        dropout=options.lora_dropout,
        target_modules=options.lora_target_modules,
    )
    settings = Settings(
        model=options.model,
        text=options.text,
        tokenizer=options.tokenizer,
        block_size=options.block_size,
        per_device_train_batch_size=options.per_device_train_batch_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        learning_rate=options.learning_rate,
        lr_scheduler_type=options.lr_scheduler_type,
        warmup_steps=options.warmup_steps,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        num_train_epochs=options.num_train_epochs,
        max_steps=options.max_steps,
        seed=options.seed,
        dtype=options.dtype,
        lora=lora if options.lora else None,
    )
    with own_files(), new_folder(options.output):
        tuning = FineTuning(settings, options.output, resume=options.resume)
        if tuning.is_finished:
            return _finished(tuning)
        spill_dirs = options.spill_dir or [default_spill_dir()]
        hardware = (
            Hardware.load(options.hardware)
            if options.hardware
            else penstock.probe(spill_dirs, time_budget_s=PROBE_S)
        )
        predicted = tuning.predict(options.device_budget, hardware, options.policy, options.endurance)
        if not options.json:
            _show(predicted, tuning)
        with penstock.offload(
            device_budget=options.device_budget,
            spill_dir=spill_dirs,
            hardware=hardware,
            policy=options.policy,
            endurance=options.endurance,
        ) as run:
            outcome = _train(tuning, run, options.save_steps)
            report = run.report() if len(outcome.losses) > outcome.begun else None
    return _answer(tuning, outcome, predicted, report)


def _quiet() -> None:
    """What others say on the way would cut the bar in pieces."""
    from transformers.utils import logging as library

    library.disable_progress_bar()
    library.set_verbosity_error()


def _show(predicted: Summary, tuning: FineTuning) -> None:
    """Before training begins, which takes long."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True, stderr=True)
    steps = counted(tuning.total_steps, "step")
    console.print(f"{steps} of {counted(tuning.settings.sequences_per_step, 'sequence')}, predicted:")
    for name, text in predicted.rows():
        console.print(f"  {name:<16} {text}")


def _train(tuning: FineTuning, run: Offload, save_steps: int) -> Outcome:
    with steps_progress("reading", tuning.total_steps) as show, interrupts_noted() as interrupted:
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
