"""`penstock finetune`: losses and model of a plain loop in memory, also when it is interrupted or killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock import cli
from penstock.options import FineTuneOptions
from tests.support import finetuning
from tests.support.runs import HARDWARE, bits

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from penstock.integrations import finetune  # noqa: E402

PENSTOCK = (sys.executable, "-c", "import sys; from penstock.cli import main; sys.exit(main())")
SETTINGS: dict[str, Any] = {
    "max_steps": 5,
    "block_size": 32,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "weight_decay": 0.1,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finetune")
    finetuning.make(folder / "model")
    finetuning.make(folder / "tied", {**finetuning.SMALL, "tie_word_embeddings": True})
    (folder / "text").write_text(Path(finetuning.__file__).read_text())
    HARDWARE.save(folder / "hardware.json")
    return folder


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The larger weights of the small model count as large."""
    monkeypatch.setattr(finetune, "ROWS_BYTES", 300_000)


def command(
    files: Path, output: Path, budget: str, *more: str, model: str = "model", **changes: Any
) -> list[str]:
    settings = {**SETTINGS, **changes}
    options = [
        text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    return [
        *("finetune", str(files / model), str(files / "text"), "--device-budget", budget, "--json"),
        *("--tokenizer", "bytes", "-o", str(output), "--hardware", str(files / "hardware.json")),
        *("--policy", "g10", "--spill-dir", str(output.parent), *options, *more),
    ]


def ran(arguments: Sequence[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert cli.main(arguments) == code, capsys.readouterr().err
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize("budget, more", [("7MiB", ()), ("5MiB", ("--lora",))])
def test_as_in_memory(
    budget: str, more: tuple[str, ...], files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, model = finetuning.train(files / "model", files / "text", lora=bool(more), **SETTINGS)
    arguments = command(files, tmp_path / "out", budget, *more)
    answer = ran(arguments, capsys)
    assert answer["losses"] == expected
    report = answer["report"]
    assert report["peak_bytes"] <= report["device_budget_bytes"] < answer["predicted"]["in_memory_bytes"]
    assert answer["predicted"]["peak_bytes"] <= report["device_budget_bytes"]
    assert report["loaded_bytes"] > 0
    kind = peft.AutoPeftModelForCausalLM if more else transformers.AutoModelForCausalLM
    written = kind.from_pretrained(tmp_path / "out" / "model")
    assert bits(written.state_dict().values()) == bits(model.state_dict().values())

    left = {path.name for path in (tmp_path / "out").iterdir()}
    (tmp_path / "out" / finetune.CHECKPOINT).write_bytes(b"of a process that was killed")
    again = ran(arguments, capsys)
    assert again["finished"] and again["losses"] == expected
    assert {path.name for path in (tmp_path / "out").iterdir()} == left


def test_host_memory_is_a_tier(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = dict.fromkeys(("device_to_host_bytes_per_s", "host_to_device_bytes_per_s"), 8e9)
    replace(HARDWARE, **rates).save(tmp_path / "hardware.json")
    expected, _ = finetuning.train(files / "model", files / "text", **SETTINGS)
    more = ("--host-budget", "64MiB", "--hardware", str(tmp_path / "hardware.json"))
    answer = ran(command(files, tmp_path / "out", "7MiB", *more), capsys)
    assert answer["losses"] == expected
    report = answer["report"]
    assert 0 < report["host_bytes"] <= 64 << 20 and report["evicted_bytes"] > 0


@pytest.mark.parametrize("has", [True, False])
def test_a_processor_without_bfloat16_is_told(
    has: bool, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has)
    for dtype in ("float32", "bfloat16"):
        settings = FineTuneOptions(
            model=files / "model", text=files / "text", tokenizer="bytes", **{**SETTINGS, "dtype": dtype}
        )
        finetune.FineTuning(settings, tmp_path / dtype)
    said = [text for text in caplog.messages if text.startswith("this processor has no instructions")]
    assert len(said) == (not has)


@pytest.mark.parametrize("model, dtype", [("model", "float32"), ("tied", "bfloat16")])
def test_what_stops_goes_on(
    model: str, dtype: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped amid it by its caller, and gone on with in another budget, by the command; in a folder in which
    a process was killed before it began."""
    given = {**SETTINGS, "dtype": dtype}
    expected, _ = finetuning.train(files / model, files / "text", **given)
    settings = FineTuneOptions(model=files / model, text=files / "text", tokenizer="bytes", **given)
    (tmp_path / "out").mkdir()
    for name in ("tokens.bin", "tokens.partial", ".finetune.json.123.0"):
        (tmp_path / "out" / name).write_text("cut")
    tuning = finetune.FineTuning(settings, tmp_path / "out")
    with penstock.offload(
        device_budget="9MiB",
        spill_dir=tmp_path,
        hardware=HARDWARE,
        planning=penstock.PlanOptions(policy="g10"),
    ) as run:
        outcome = tuning.train(run, save_steps=100, on_step=lambda steps, loss: steps == 3)
    assert outcome.losses == expected[:3] and not outcome.finished
    with pytest.raises(penstock.InvalidArgument, match=r"other settings \(seed\)"):
        finetune.FineTuning(FineTuneOptions(**{**vars_of(settings), "seed": 1}), tmp_path / "out")
    answer = ran(command(files, tmp_path / "out", "7MiB", "--resume", model=model, dtype=dtype), capsys)
    assert answer["begun"] == 3 and answer["losses"] == expected
    assert not list((tmp_path / "out").glob(".*"))
    with (
        penstock.offload(device_budget="9MiB", spill_dir=tmp_path, hardware=HARDWARE) as run,
        pytest.raises(penstock.InvalidArgument, match="this training is finished"),
    ):
        finetune.FineTuning(settings, tmp_path / "out").train(run, save_steps=100)


def vars_of(settings: FineTuneOptions) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_a_process_that_is_killed_goes_on(files: Path, tmp_path: Path) -> None:
    steps = 30
    expected, _ = finetuning.train(files / "model", files / "text", **{**SETTINGS, "max_steps": steps})
    arguments = command(files, tmp_path / "out", "30MiB", max_steps=steps, save_steps=3)
    program = [*PENSTOCK, *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    checkpoint = tmp_path / "out" / finetune.CHECKPOINT
    for how in (signal.SIGKILL, signal.SIGINT):  # what went on can be interrupted, too
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        deadline = time.monotonic() + 120
        while not checkpoint.exists() or checkpoint.stat().st_mtime_ns == before:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.01)
        process.send_signal(how)
        said, _ = process.communicate(timeout=120)
        if how == signal.SIGINT:
            assert process.returncode == 130
            assert json.loads(said)["finished"] is False
        else:
            assert process.returncode == -how
    ended = subprocess.run(program, capture_output=True, env=environment, timeout=120, check=True)
    answer = json.loads(ended.stdout)
    assert 0 < answer["begun"] < steps and answer["losses"] == expected


MISTAKES = {
    "no text": (("text", "nothing"), 1, "there is no text"),
    "no model": (("model", "nothing"), 1, "not a model directory"),
    "no tokenizer": (("--tokenizer", None), 1, "--tokenizer bytes"),
    "too little text": (("--block-size", "100", "--gradient-accumulation-steps", "50"), 1, "Give more text"),
    "too long": (("--block-size", "4096"), 1, "128 positions"),
    "too small": (("--device-budget", "1MiB"), 3, "raise --device-budget to"),
    "nothing to go on with": (("--resume",), 1, "nothing to go on with"),
}


@pytest.mark.parametrize("name", sorted(MISTAKES))
def test_a_mistake_is_one_line(
    name: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, code, expected = MISTAKES[name]
    arguments = command(files, tmp_path / "out", "9MiB")
    if change == ("--tokenizer", None):
        place = arguments.index("--tokenizer")
        del arguments[place : place + 2]
    elif change[0] in ("text", "model"):
        arguments[arguments.index(str(files / change[0]))] = str(change[1])
    else:
        arguments += [str(part) for part in change]
    assert cli.main(arguments) == code
    said = capsys.readouterr()
    assert expected in said.err and said.err.count("\n") == 1
    assert expected in json.loads(said.out)["error"]
    assert not (tmp_path / "out").exists(), "nothing is left"


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"model_type": "unheard_of"}, "unheard_of"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "no causal language model"),
        ("{", "cannot be used"),
    ],
)
def test_other_models_are_refused(config: Any, expected: str, files: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    settings = FineTuneOptions(model=tmp_path, text=files / "text", tokenizer="bytes")
    with pytest.raises(penstock.PenstockError, match=expected):
        finetune.FineTuning(settings, tmp_path / "out")


def test_other_texts_are_refused(files: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    settings = FineTuneOptions(model=files / "model", text=tmp_path / "empty", tokenizer="bytes")
    with pytest.raises(penstock.InvalidArgument, match="is empty"):
        finetune.FineTuning(settings, tmp_path / "out")


def test_half_precision_files_become_whole(files: Path, tmp_path: Path) -> None:
    folder = finetuning.make(tmp_path / "half", dtype=torch.bfloat16)
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with penstock.offload(device_budget="4MiB", spill_dir=tmp_path, hardware=HARDWARE) as run:
        loaded = finetune.load(folder, run=run, dtype=torch.float32)
        assert bits(loaded.parameters()) == bits(expected.parameters())
