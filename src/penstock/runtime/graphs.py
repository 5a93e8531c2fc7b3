"""Graphs of kernels, which are recorded with their tensors' addresses and replayed: refused in a run on an
accelerator, where an address lasts until its tensor leaves."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch._inductor.config as inductor

from penstock.errors import InvalidArgument
from penstock.runtime.replacing import replace

# What records or replays: an object of torch's, and its names.
_ENTRIES = (
    ("accelerator.Graph", ("capture_begin", "replay")),
    ("cuda", ("make_graphed_callables",)),
    ("cuda.CUDAGraph", ("capture_begin", "replay")),
    ("cuda.graph", ("__enter__",)),
    ("xpu", ("make_graphed_callables",)),
    ("xpu.XPUGraph", ("capture_begin", "replay")),
    ("xpu.graph", ("__enter__",)),
)


def _refuse(name: str, instead: str) -> NoReturn:
    raise InvalidArgument(
        f"{name} cannot be used while a run is open: a graph repeats kernels at the addresses that tensors "
        f"had, and in a run they change. {instead}"
    )


class _NoGraphs:
    """A torch._inductor.cudagraph_utils.CUDAGraphPolicy. torch.compile asks it before it runs anything."""

    def should_wrap(self, compiled_graph: Any) -> bool:
        return True

    def wrap_output(self, output_code: Any) -> Any:
        return output_code

    def cudagraphify(self, *_: Any, **__: Any) -> NoReturn:
        _refuse(
            "a graph of torch.compile",
            'Compile with mode="default" or "max-autotune-no-cudagraphs", and leave triton.cudagraphs off.',
        )


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Recording and replaying raise InvalidArgument meanwhile."""
    with contextlib.ExitStack() as undo:
        for path, names in _ENTRIES:
            module, _, kind = path.partition(".")
            owner: Any = importlib.import_module(f"torch.{module}")
            owner = getattr(owner, kind, None) if kind else owner
            for name in names:
                if hasattr(owner, name):
                    replace(undo, owner, name, _refusing(f"torch.{path}", name))
        if hasattr(inductor, "cudagraph_policy"):
            undo.enter_context(inductor.patch("cudagraph_policy", _NoGraphs()))
        else:  # an older torch, which asks nobody
            compiler = importlib.import_module("torch._inductor.compile_fx")
            replace(undo, compiler, "cudagraphify", _NoGraphs().cudagraphify)
        yield


def _refusing(path: str, name: str) -> Callable[..., NoReturn]:
    def refusing(*_: Any, **__: Any) -> NoReturn:
        _refuse(path if name == "__enter__" else f"{path}.{name}", "Run the kernels without one.")

    return refusing
