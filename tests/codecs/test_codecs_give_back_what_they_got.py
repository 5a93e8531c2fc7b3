"""What codecs give back: the same bits where they are lossless, else the values in half precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import codecs
from penstock.codecs import bit_patterns
from penstock.codecs.bitmask import decode_by_operators, encode_by_operators
from penstock.core.plan import CODECS as PLANNED
from penstock.core.trace import csr_bytes
from penstock.errors import InvalidArgument, InvalidFile

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
]


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[torch.dtype] = DTYPES) -> torch.Tensor:
    """Any bit patterns, any share of them zero, in any dense or strided layout."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    whole = [size * step for size, step in zip(shape, steps, strict=True)]
    bits = torch.randint(0, 256, (*whole, dtype.itemsize), dtype=torch.uint8, generator=generator)
    density = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    bits *= torch.rand((*whole, 1), generator=generator) < density
    if dtype is torch.bool:
        bits = bits % 2
    tensor = bits.view(dtype).view(whole)
    tensor = tensor[tuple(slice(None, None, step) for step in steps)]
    return tensor.permute(draw(st.permutations(range(len(shape)))))


def patterns(tensor: torch.Tensor) -> bytes:
    return torch.cat([tensor.reshape(-1), tensor.new_zeros(1)]).view(torch.uint8).numpy().tobytes()


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    left, right = left.reshape(-1), right.reshape(-1)
    return left.dtype is right.dtype and patterns(left) == patterns(right)


@given(tensor=tensors())
@settings(max_examples=300)
def test_lossless_codecs_keep_every_bit(tensor: torch.Tensor) -> None:
    for name, codec in codecs.CODECS.items():
        if codec.lossless:
            packed = codecs.encode(name, tensor)
            back = codecs.decode(name, packed, like=tensor)
            assert back.shape == tensor.shape
            assert back.stride() == torch.empty_like(tensor).stride()
            assert same(back, tensor)


@given(tensor=tensors())
@settings(max_examples=300)
def test_operators_of_torch_make_the_same_bytes_as_the_native_code(tensor: torch.Tensor) -> None:
    packed = codecs.encode("csr", tensor)
    elements = bit_patterns(tensor)
    assert torch.equal(encode_by_operators(elements), packed)
    back = torch.empty_like(elements)
    assert decode_by_operators(packed, back)
    assert torch.equal(back, elements)


@given(tensor=tensors(), position=st.integers(0, 1 << 20), bit=st.integers(0, 7), cut=st.booleans())
@settings(max_examples=300)
def test_damage_is_one_clear_error_or_only_in_the_values(
    tensor: torch.Tensor, position: int, bit: int, cut: bool
) -> None:
    packed = codecs.encode("csr", tensor)
    position %= packed.numel()
    damaged = packed[:position].clone() if cut else packed.clone()
    if not cut:
        damaged[position] ^= 1 << bit
    elements = bit_patterns(tensor)
    by_operators = decode_by_operators(damaged, torch.empty_like(elements))
    head_bytes = (-(-elements.numel() // 128) + 1) * 4 + -(-elements.numel() // 8)
    if cut or position < head_bytes:
        assert not by_operators
        with pytest.raises(InvalidFile, match="damaged"):
            codecs.decode("csr", damaged, like=tensor)
    else:
        assert by_operators
        codecs.decode("csr", damaged, like=tensor)


@given(tensor=tensors([torch.float32]), name=st.sampled_from(["fp16", "bf16"]))
@settings(max_examples=200)
def test_half_precision_rounds_to_nearest_and_never_overflows(tensor: torch.Tensor, name: str) -> None:
    packed = codecs.encode(name, tensor)
    assert packed.numel() == 2 * tensor.numel()
    back = codecs.decode(name, packed, like=tensor)
    assert back.shape == tensor.shape
    if name == "bf16":
        expected = tensor.to(torch.bfloat16).float()
    else:
        finite = tensor.isfinite()
        expected = torch.where(finite, tensor.clamp(-65504, 65504), tensor).to(torch.float16).float()
    assert torch.equal(back.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    assert torch.equal(back.isnan(), tensor.isnan())


def test_zeros_with_a_sign_and_nans_with_a_payload_come_back() -> None:
    patterns = torch.tensor([0, -(1 << 31), 0x7F800001, 0x7FC12345, 1], dtype=torch.int32)
    back = codecs.decode("csr", codecs.encode("csr", patterns.view(torch.float32)), like=patterns)
    assert torch.equal(back, patterns)


@pytest.mark.parametrize("density", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_planners_count_the_bytes_that_it_takes(density: float, itemsize: int) -> None:
    elements = 1280
    tensor = torch.zeros(elements, dtype={2: torch.float16, 4: torch.float32, 8: torch.float64}[itemsize])
    tensor[: math.ceil(density * elements)] = 1
    taken = codecs.encode("csr", tensor).numel()
    sizes = (np.array([number]) for number in (elements, itemsize, density))
    assert csr_bytes(*sizes).tolist() == [taken]


def test_codecs_that_plans_name_are_there() -> None:
    assert {*PLANNED} - {"raw"} <= {*codecs.CODECS}


def test_a_view_of_a_conjugate_is_stored_as_its_values() -> None:
    tensor = torch.tensor([1 + 2j, 0, -3j])
    assert torch.equal(codecs.decode("csr", codecs.encode("csr", tensor.conj()), like=tensor), tensor.conj())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: codecs.encode("zip", torch.ones(3)), "no codec 'zip': choose one of csr, fp16, bf16"),
        (lambda: codecs.encode("fp16", torch.ones(3, dtype=torch.float64)), "float64: use a lossless codec"),
        (lambda: codecs.encode("csr", torch.ones(3).to_sparse()), "sparse_coo"),
        (lambda: codecs.decode("csr", torch.ones(8), like=torch.ones(3)), "float32 of shape"),
        (
            lambda: codecs.decode("bf16", torch.zeros(5, dtype=torch.uint8), like=torch.ones(3)),
            "not 3 elements",
        ),
    ],
)
def test_what_cannot_be_done_is_one_clear_error(call, said: str) -> None:
    with pytest.raises((InvalidArgument, InvalidFile), match=said):
        call()
