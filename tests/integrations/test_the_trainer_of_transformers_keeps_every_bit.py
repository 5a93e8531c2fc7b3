"""transformers.Trainer with penstock's callback: the losses, weights and checkpoints that it has without."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import penstock
from tests.support.runs import Bits, bits, state_bits
from tests.support.trainers import check_moved, language_model, options, samples, tight

transformers = pytest.importorskip("transformers")

from penstock.integrations import versions  # noqa: E402
from penstock.integrations.transformers import Penstock  # noqa: E402

STEPS, SAVED = 7, 4  # 22 samples in pairs, two pairs a step: the last step of an epoch has one
OF_TIME = ("runtime", "per_second", "preparation_time")


class Found(NamedTuple):
    """What training leaves: what was logged, and the bits of weights and of the optimizer's state."""

    log: list[dict[str, Any]]
    weights: Bits
    state: Bits


def arguments(folder: Path, **changes: Any) -> transformers.TrainingArguments:
    given = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 1,
        "save_steps": SAVED,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        "dataloader_pin_memory": False,
    }
    return transformers.TrainingArguments(str(folder), **given | changes)


def trainer(folder: Path, *callbacks: Any, **changes: Any) -> transformers.Trainer:
    return transformers.Trainer(
        language_model(),
        arguments(folder, **changes),
        train_dataset=samples(22),
        eval_dataset=samples(6, seed=6),
        callbacks=list(callbacks),
    )


def found(trained: transformers.Trainer) -> Found:
    log = [
        {name: value for name, value in entry.items() if not name.endswith(OF_TIME)}
        for entry in trained.state.log_history
    ]
    return Found(log, bits(trained.model.parameters()), state_bits(trained.optimizer.optimizer))


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    """Trained without penstock: the folder with its checkpoints, and what was found."""
    folder = tmp_path_factory.mktemp("in_memory")
    without = trainer(folder)
    without.train()
    return folder, found(without)


@pytest.fixture(scope="module")
def budget(tmp_path_factory: pytest.TempPathFactory) -> int:
    folder = tmp_path_factory.mktemp("generous")
    callback = Penstock(**options("1GiB", folder))
    trainer(folder, callback, save_strategy="no").train()
    assert callback.run is not None
    return tight(callback.run.report())


def checkpoint_bits(folder: Path) -> Bits:
    weights = load_file(folder / "model.safetensors")
    state = torch.load(folder / "optimizer.pt")["state"]
    moments = [state[key][name] for key in sorted(state) for name in sorted(state[key])]
    return bits([*(weights[name] for name in sorted(weights)), *moments])


def test_steps_evaluations_and_checkpoints(
    in_memory: tuple[Path, Found], budget: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, expected = in_memory
    callback = Penstock(**options(budget, tmp_path))
    inside = trainer(tmp_path, callback)
    with caplog.at_level(logging.INFO, "penstock"):
        inside.train()

    assert found(inside) == expected
    assert any("eval_loss" in entry for entry in expected.log)
    for step in (SAVED, STEPS):
        assert checkpoint_bits(tmp_path / f"checkpoint-{step}") == checkpoint_bits(
            folder / f"checkpoint-{step}"
        )
    run = callback.run
    assert run is not None and run.closed
    report = run.report()
    check_moved(report, budget)
    evaluations = sum("eval_loss" in entry for entry in expected.log)
    assert report.steps == STEPS + evaluations * 3  # batches
    assert len([record for record in caplog.records if "predicted" in record.message]) == 1


def test_resuming_from_a_checkpoint_with_the_model_built_inside(
    in_memory: tuple[Path, Found], budget: int, tmp_path: Path
) -> None:
    folder, expected = in_memory
    with Penstock(**options(budget, tmp_path)) as callback:
        inside = trainer(tmp_path, callback, save_strategy="no")
        inside.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}"))
        assert callback.run is not None and not callback.run.closed
        evaluated = inside.evaluate()
        inside.save_model(str(tmp_path / "saved"))
        found_inside = found(inside)._replace(log=inside.state.log_history[: len(expected.log)])
        check_moved(callback.run.report(), budget)

    assert found_inside[1:] == expected[1:]
    losses = [entry.get("loss", entry.get("eval_loss")) for entry in expected.log]
    assert [entry.get("loss", entry.get("eval_loss")) for entry in found_inside.log] == losses
    outside = trainer(tmp_path)
    outside.model.load_state_dict(inside.model.state_dict())
    assert evaluated["eval_loss"] == outside.evaluate()["eval_loss"]
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert bits(saved.parameters()) == expected.weights
    assert callback.run.closed


def test_training_that_failed_can_be_repeated(
    in_memory: tuple[Path, Found], budget: int, tmp_path: Path
) -> None:
    _, expected = in_memory

    class Unlucky(transformers.TrainerCallback):
        left = 1

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2 and self.left:
                self.left -= 1
                raise RuntimeError("out of luck")

    callback, unlucky = Penstock(**options(budget, tmp_path)), Unlucky()
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer(tmp_path, callback, unlucky, save_strategy="no").train()
    again = trainer(tmp_path, callback, unlucky, save_strategy="no")
    again.train()

    assert found(again) == expected
    assert callback.run is not None and callback.run.closed
    assert callback.run.report().peak_bytes <= budget


def test_a_budget_that_is_too_small_is_said(budget: int, tmp_path: Path) -> None:
    class Greedy(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            torch.ones(32 << 20)
            return super().compute_loss(model, inputs, *args, **named)

    callback = Penstock(**options(budget, tmp_path))
    with callback, pytest.raises(penstock.BudgetTooSmall, match=r"128\.0 MiB"):
        Greedy(
            language_model(),
            arguments(tmp_path),
            train_dataset=samples(4),
            eval_dataset=[],
            callbacks=[callback],
        ).train()
    assert callback.run is not None and callback.run.closed


def test_adapters_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def train(*callbacks: Any) -> tuple[Found, Bits]:
        with callbacks[0] if callbacks else contextlib.nullcontext():
            adapters = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
            training = transformers.Trainer(
                peft.get_peft_model(language_model(), adapters),
                arguments(tmp_path, eval_strategy="no", save_strategy="no"),
                train_dataset=samples(22),
                callbacks=list(callbacks),
            )
            training.train()
            training.save_model(str(tmp_path))
            return found(training), bits(load_file(tmp_path / "adapter_model.safetensors").values())

    generous = Penstock(**options("1GiB", tmp_path))
    expected = train()
    assert train(generous) == expected
    assert generous.run is not None
    budget = tight(generous.run.report())
    callback = Penstock(**options(budget, tmp_path))
    assert train(callback) == expected
    assert callback.run is not None
    check_moved(callback.run.report(), budget)


def test_what_moves_tensors_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="spill_dri"):
        Penstock(device_budget="1GiB", spill_dri=tmp_path)
    training = trainer(tmp_path, Penstock(**options("1GiB", tmp_path)), save_strategy="no")
    training.args.fsdp = ["full_shard"]
    with pytest.raises(penstock.InvalidArgument, match="FSDP"):
        training.train()


def test_another_version_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "version", lambda library: "4.99.1")
    versions.warn_if_unknown.cache_clear()
    for _ in range(2):
        Penstock(device_budget="1GiB")
    versions.warn_if_unknown.cache_clear()

    (said,) = [record.message for record in caplog.records if record.name == "penstock"]
    assert "transformers" in said and "4.99.1" in said
