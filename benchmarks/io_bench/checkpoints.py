"""Part two: the state of a model, saved to stay and loaded by everything that takes a state dict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from io_bench.formats import FORMATS, Format, State, Unavailable
from io_bench.measure import (
    Sample,
    make_cold,
    make_warm,
    remove,
    rotated,
    same_bits,
    settle,
    summary,
    timed,
    touch,
)

WIDTH, VOCABULARY, CONTEXT = 1024, 50257, 1024
QUICK_WIDTH, QUICK_VOCABULARY, QUICK_CONTEXT = 256, 8192, 256
Samples = dict[str, list[Sample]]


def gpt_state(size_bytes: int, seed: int, quick: bool = False) -> State:
    """The weights of a GPT of about ``size_bytes``: large matrices, and many small vectors."""
    if quick:
        width, vocabulary, context = QUICK_WIDTH, QUICK_VOCABULARY, QUICK_CONTEXT
    else:
        width, vocabulary, context = WIDTH, VOCABULARY, CONTEXT
    block: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (width,),
        "attention_norm.bias": (width,),
        "query_key_value.weight": (3 * width, width),
        "query_key_value.bias": (3 * width,),
        "projection.weight": (width, width),
        "projection.bias": (width,),
        "feed_norm.weight": (width,),
        "feed_norm.bias": (width,),
        "up.weight": (4 * width, width),
        "up.bias": (4 * width,),
        "down.weight": (width, 4 * width),
        "down.bias": (width,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "tokens.weight": (vocabulary, width),
        "positions.weight": (context, width),
    }
    layers = max(1, round((size_bytes / 4 - elements(shapes)) / elements(block)))
    for layer in range(layers):
        shapes.update({f"blocks.{layer}.{name}": shape for name, shape in block.items()})
    shapes.update({"norm.weight": (width,), "norm.bias": (width,)})
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def elements(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def measure_checkpoints(
    directory: Path,
    size_bytes: int,
    names: list[str],
    rounds: int,
    seed: int,
    quick: bool,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Saving and loading by format: what goes to the document."""
    state = gpt_state(size_bytes, seed, quick)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    total_bytes = sum(tensor.nbytes for tensor in state.values())
    forms, unavailable = available(names)
    samples: dict[str, Samples] = {form.name: {} for form in forms}
    does = {form.name: form.does for form in forms}
    failed: dict[str, str] = {}
    cold_left_bytes: dict[str, int] = {}
    for number in range(rounds):
        for tensor in state.values():
            tensor.neg_()  # other bits in each round
        for form in list(rotated(forms, number)):
            tell(f"{form.name}: round {number + 1} of {rounds}")
            path = directory / f"state{form.suffix}"
            try:
                left_bytes = one_round(form, state, into, path, samples[form.name])
            except Exception as error:  # the others go on
                failed[form.name] = f"{type(error).__name__}: {error}"
                forms.remove(form)
                del samples[form.name]
            else:
                cold_left_bytes[form.name] = max(left_bytes, cold_left_bytes.get(form.name, 0))
            finally:
                remove(path)
                settle(directory)
    return {
        "bytes": total_bytes,
        "tensors": len(state),
        "rows": {
            name: {kind: summary(taken, total_bytes) for kind, taken in kinds.items()}
            for name, kinds in samples.items()
        },
        "cold_left_bytes": {name: left for name, left in cold_left_bytes.items() if left},
        "does": does,
        "unavailable": unavailable,
        "failed": failed,
    }


def available(names: list[str]) -> tuple[list[Format], dict[str, str]]:
    """The formats of ``names`` that take a whole state, and why others cannot be used."""
    forms, unavailable = [], {}
    for name in names:
        if FORMATS[name].one_tensor:
            continue
        try:
            forms.append(FORMATS[name]())
        except Unavailable as reason:
            unavailable[name] = str(reason)
    return forms, unavailable


def one_round(form: Format, state: State, into: State, path: Path, samples: Samples) -> int:
    """Save, load cold, load warm. Gives the bytes that the cold load found in the page cache."""

    def add(kind: str, *parts: Sample) -> None:
        total = Sample(sum(part.wall_s for part in parts), sum(part.cpu_s for part in parts))
        samples.setdefault(kind, []).append(total)

    def load(kind: str) -> None:
        for tensor in into.values():
            tensor.zero_()
        loading, loaded = timed(lambda: form.load(path, into))
        touching, _ = timed(lambda: touch(loaded.values()))
        verify(form.name, state, loaded)
        add(kind, loading, touching)
        add(f"{kind}, untouched", loading)

    saving, _ = timed(lambda: form.save(state, path, durable=True))
    if not form.loads_only:
        add("save+fsync", saving)
    settle(path.parent)
    left_bytes = make_cold(path)
    load("cold load")
    make_warm(path)
    load("warm load")
    return left_bytes


def verify(who: str, state: State, loaded: State) -> None:
    if state.keys() != loaded.keys():
        raise RuntimeError(f"{who}: {sorted(state.keys() ^ loaded.keys())} are not on both sides")
    for name, tensor in state.items():
        if not same_bits(tensor, loaded[name]):
            raise RuntimeError(f"{who}: {name} came back with other bits")
