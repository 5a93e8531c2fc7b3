"""A graph of kernels has their tensors' addresses in it: a run on an accelerator refuses it before it runs.

Without a GPU: torch's functions are called as they would be there, with stand-ins for what only a GPU gives.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import compile_fx, config
from torch._inductor.output_code import cudagraph_post_compile
from torch._inductor.utils import BoxedBool

from penstock.errors import InvalidArgument
from penstock.storage.spill import SpillSpace
from tests.support.checked import checked_run


def enter(kind: Any) -> None:
    stand_in = kind.__new__(kind)
    stand_in.__enter__()


GRAPH = object()
CALLS: dict[str, Callable[[], object]] = {
    "torch.cuda.graph": lambda: enter(torch.cuda.graph),
    "torch.cuda.CUDAGraph.capture_begin": lambda: torch.cuda.CUDAGraph.capture_begin(GRAPH),  # type: ignore[arg-type]
    "torch.cuda.CUDAGraph.replay": lambda: torch.cuda.CUDAGraph.replay(GRAPH),  # type: ignore[arg-type]
    "torch.cuda.make_graphed_callables": lambda: torch.cuda.make_graphed_callables(torch.nn.ReLU(), ()),
}


@pytest.mark.parametrize("name", CALLS)
def test_by_name(spill: SpillSpace, name: str) -> None:
    with checked_run(spill, 1 << 20):
        with pytest.raises(InvalidArgument, match=name) as raised:
            CALLS[name]()
        assert "at the addresses" in str(raised.value)
    with pytest.raises(Exception) as raised:  # there is no GPU
        CALLS[name]()
    assert not isinstance(raised.value, InvalidArgument)


def compile_as_reduce_overhead() -> None:
    """The end of torch.compile(mode="reduce-overhead"), for a region that is on a GPU."""
    region = SimpleNamespace(
        current_callable=lambda inputs: pytest.fail("it ran"),
        cudagraph_info=SimpleNamespace(cudagraph_fail_reasons=[], placeholders=[], stack_traces=[]),
        fx_kwargs={"is_inference": True, "is_backward": False, "static_input_idxs": ()},
        device_idxs={0},
        mutated_input_idxs=set(),
    )
    with config.patch({"triton.cudagraph_trees": False}):  # else it asks the driver here
        cudagraph_post_compile([], region, BoxedBool(True), {}, None)  # type: ignore[arg-type]


def test_of_torch_compile(spill: SpillSpace) -> None:
    before = compile_fx.cudagraphify
    with checked_run(spill, 1 << 20), pytest.raises(InvalidArgument, match="no-cudagraphs"):
        compile_as_reduce_overhead()
    assert getattr(config, "cudagraph_policy", None) is None and compile_fx.cudagraphify is before
