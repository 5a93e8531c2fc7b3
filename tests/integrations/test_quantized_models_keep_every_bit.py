"""Weights in few bits, and optimizers with eight-bit state, of bitsandbytes and torchao: with the same bits.
`make test-versions` has both libraries; elsewhere these tests skip."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from penstock import cli
from tests.support import finetuning
from tests.support.runs import HARDWARE, Bits, Step, bits, differences, in_memory, offloaded

WIDTH, LAYERS, STEPS = 256, 6, 6

Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    hidden = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 8))


class Adapted(nn.Module):
    """A frozen layer, and a trained one of low rank beside it."""

    def __init__(self, frozen: nn.Module) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.frozen(x) + self.up(self.down(x))
        return found


def with_adapters(quantize: Callable[[nn.Linear], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = layers()
    for layer in list(model)[:LAYERS]:
        layer[0] = Adapted(quantize(layer[0]))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-3)


def four_bits(linear: nn.Linear) -> nn.Module:
    library = pytest.importorskip("bitsandbytes")
    made: nn.Module = library.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4")
    made.load_state_dict(linear.state_dict())
    return made.to("cpu")


def eight_bits(linear: nn.Linear) -> nn.Module:
    library = pytest.importorskip("torchao.quantization")
    library.quantize_(linear, library.Int8WeightOnlyConfig())
    return linear


def optimized_by(module: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = layers()
    return model, pytest.importorskip(module).AdamW8bit(model.parameters(), lr=1e-3)


BUILDS: dict[str, Build] = {
    "four bits of bitsandbytes": lambda: with_adapters(four_bits),
    "eight bits of torchao": lambda: with_adapters(eight_bits),
    "AdamW of bitsandbytes": lambda: optimized_by("bitsandbytes.optim"),
    "AdamW of torchao": lambda: optimized_by("torchao.optim"),
}


def training(build: Build) -> Callable[[Step], Bits]:
    def program(step: Step) -> Bits:
        model, optimizer = build()
        found: Bits = []
        for number in range(STEPS):
            with step():
                batch = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(number))
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found += bits([loss])
        return found + bits(weight for weight in model.parameters() if weight.requires_grad)

    return program


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_a_budget_changes_no_bit(name: str, tmp_path: Path) -> None:
    program = training(BUILDS[name])
    expected = in_memory(program)
    _, generous = offloaded(program, "1GiB", tmp_path)
    budget_bytes = (generous.minimum_bytes + 2 * generous.peak_bytes) // 3
    found, report = offloaded(program, budget_bytes, tmp_path)
    assert differences(expected, found) == []
    assert report.peak_bytes <= budget_bytes < generous.peak_bytes
    assert report.loaded_bytes > 0 or report.recomputed_bytes > 0


SETTINGS: dict[str, Any] = {"max_steps": 6, "block_size": 32, "gradient_accumulation_steps": 2}
CONFIG = {**finetuning.SMALL, "num_hidden_layers": 6}


def command(folder: Path, *more: str) -> list[str]:
    HARDWARE.save(folder / "hardware.json")
    (folder / "text").write_text(Path(__file__).read_text())
    settings = [
        text for name, value in SETTINGS.items() for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    return [
        *("finetune", str(folder / "model"), str(folder / "text"), "--tokenizer", "bytes", "--json"),
        *("--hardware", str(folder / "hardware.json"), "--policy", "g10", "--spill-dir", str(folder)),
        *("--device-budget", "11.5MiB", "-o", str(folder / "out"), *settings, *more),
    ]


@pytest.mark.parametrize(
    "few_bits, dtype, tied",
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "float32", False),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "bfloat16", True),
        ({"load_in_8bit": True}, "float32", False),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_fine_tuning_in_few_bits_is_as_in_memory(
    few_bits: dict[str, Any], dtype: str, tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    finetuning.make(tmp_path / "model", {**CONFIG, "tie_word_embeddings": tied})
    typed = command(tmp_path, "--lora", "--dtype", dtype, "--learning-rate", "1e-3")
    for name, value in few_bits.items():
        typed += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    assert cli.main(typed) == 0, capsys.readouterr().err
    answer = json.loads(capsys.readouterr().out)
    few_bits = {"bnb_4bit_quant_type": "nf4", **few_bits}
    expected, model = finetuning.train(
        tmp_path / "model", tmp_path / "text", **SETTINGS, dtype=dtype, lora=True, few_bits=few_bits
    )
    assert answer["losses"] == expected
    report = answer["report"]
    assert report["peak_bytes"] <= report["device_budget_bytes"] < answer["predicted"]["in_memory_bytes"]
    assert report["loaded_bytes"] > 0
    written = load_file(tmp_path / "out" / "model" / "adapter_model.safetensors")
    adapters = peft.get_peft_model_state_dict(model)
    assert written.keys() == adapters.keys()
    assert bits(written.values()) == bits(adapters[name] for name in written)


@pytest.mark.parametrize(
    "more, expected",
    [
        (("--load-in-4bit",), "add --lora"),
        (("--load-in-4bit", "--load-in-8bit", "--lora"), "exclude each other"),
        (("--load-in-8bit", "--lora", "quantized"), "is quantized already (bitsandbytes)"),
        (("--load-in-4bit", "--lora"), "pip install bitsandbytes accelerate"),
    ],
)
def test_a_mistake_is_one_line(
    more: tuple[str, ...], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    if "pip" in expected and find_spec("bitsandbytes"):
        pytest.skip("bitsandbytes is installed")
    finetuning.make(tmp_path / "model")
    if more[-1] == "quantized":
        path = tmp_path / "model" / "config.json"
        few = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
        path.write_text(json.dumps({**json.loads(path.read_text()), **few}))
        more = more[:-1]
    capsys.readouterr()  # what made the model said
    assert cli.main(command(tmp_path, *more)) == 1
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists(), "nothing is left"
