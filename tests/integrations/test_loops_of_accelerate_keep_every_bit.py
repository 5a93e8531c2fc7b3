"""A loop of one's own with accelerate: accumulation, clipping, evaluation and saved states, in a budget."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import penstock
from tests.support.runs import Bits, bits, state_bits
from tests.support.trainers import check_moved, language_model, options, samples, tight

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")  # for the model

from penstock.integrations.accelerate import offload  # noqa: E402

EPOCHS, RESUMED_AT = 2, 1


def train(
    folder: Path,
    given: dict[str, Any] | None,
    resume: Path | None = None,
    explicit: bool = False,
) -> tuple[list[float], Bits, penstock.Offload | None]:
    """Losses, weights and the optimizer's state after some epochs of 7 pairs, two pairs a step."""
    accelerate.utils.set_seed(1)
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=1 if explicit else 2, mixed_precision="no"
    )
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(samples(14), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    run = offload(accelerator, **given) if given else None
    losses = []
    with run or contextlib.nullcontext():
        if resume is not None:
            accelerator.load_state(resume)
        for epoch in range(0 if resume is None else RESUMED_AT, EPOCHS):
            model.train()
            for batch in loader:
                step = run.step() if explicit and run else contextlib.nullcontext()
                with step, accelerator.accumulate(model) if not explicit else contextlib.nullcontext():
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
            model.eval()
            with torch.no_grad():
                losses += [model(**batch).loss.item() for batch in loader]
            accelerator.save_state(folder / f"epoch-{epoch}")
        found = bits(model.parameters()) + state_bits(optimizer.optimizer)
        accelerator.save_model(model, folder / "model")
    return losses, found, run


@pytest.fixture(scope="module")
def budget(tmp_path_factory: pytest.TempPathFactory) -> int:
    folder = tmp_path_factory.mktemp("generous")
    _, _, run = train(folder, options("1GiB", folder))
    assert run is not None
    return tight(run.report())


@pytest.mark.parametrize("explicit", [False, True], ids=["accumulate", "step"])
def test_same_bits(explicit: bool, budget: int, tmp_path: Path) -> None:
    losses, expected, _ = train(tmp_path / "without", None, explicit=explicit)
    found_losses, found, run = train(tmp_path / "inside", options(budget, tmp_path), explicit=explicit)

    assert found_losses == losses
    assert found == expected
    assert run is not None and run.closed
    report = run.report()
    check_moved(report, budget)
    assert report.steps == EPOCHS * ((7 if explicit else 4) + 7)

    if explicit:
        return
    resumed_losses, resumed, _ = train(
        tmp_path / "resumed", options(budget, tmp_path), tmp_path / "inside" / "epoch-0", explicit
    )
    assert resumed == expected
    assert resumed_losses == losses[len(losses) // EPOCHS :]


def test_a_loop_that_failed_leaves_no_step_open(budget: int, tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(language_model())
    accumulate = accelerator.accumulate
    (batch,) = DataLoader(samples(2), batch_size=2)  # type: ignore[arg-type]
    with offload(accelerator, **options(budget, tmp_path)) as run:
        with pytest.raises(RuntimeError, match="out of luck"), accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            raise RuntimeError("out of luck")
        assert not run.in_step
        with torch.no_grad():
            model(**batch)
        assert not run.in_step
        with accelerator.accumulate(model):
            model(**batch)
    assert run.closed and accelerator.accumulate == accumulate
    with pytest.raises(penstock.InvalidArgument, match="spill_dir"):
        offload(accelerator, run=run, spill_dir=tmp_path)
