"""Models of transformers, and adapters of peft, on an accelerator: the plain run's bits, in any order."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.device.test_training_on_a_device_keeps_every_bit import (
    DEVICE,
    ORDERS,
    SHARES,
    STEPS,
    Configure,
    check,
    check_drawn,
)
from tests.support.language_models import MAKERS, language_model
from tests.support.runs import Program, Way, training

WIDTH = 128  # more than one segment of the allocator, by far


@functools.cache
def program(name: str, way: Way) -> Program:
    return training(language_model(name, WIDTH), STEPS, DEVICE, way)


@pytest.mark.parametrize(
    ("name", "order", "tier", "way"),
    [
        ("llama", "lazy", "host", Way("adamw, fused", clipped=True)),
        ("mixtral", "stepped", "disk", Way("adafactor", parts=2)),
        ("checkpointed gpt2", "random", "host", Way("sgd", autocast=True)),
    ],
)
def test_some(configure: Configure, name: str, order: str, tier: str, way: Way, tmp_path: Path) -> None:
    report = check(configure, program(name, way), order, 1, tier, 0.3, "optimal", tmp_path)
    # CUDA's attention makes so little that the checkpointed one fits.
    assert report.evicted_bytes > 0 or DEVICE == "cuda"


@pytest.mark.slow
@pytest.mark.parametrize("budget", SHARES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MAKERS)
def test_in_all_orders(configure: Configure, name: str, order: str, budget: str, tmp_path: Path) -> None:
    check_drawn(configure, functools.partial(program, name), name, order, budget, tmp_path)
