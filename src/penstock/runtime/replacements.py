"""What a run puts in the places of torch's and Triton's own functions while it is open.

On an accelerator graphs of kernels are refused: they are recorded with their tensors' addresses and replayed,
and an address lasts until its tensor leaves. Kernels of Triton that the program launches itself are seen, as
torch sees none of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch._inductor.config as inductor

from penstock.capture.operators import tensors_in
from penstock.errors import InvalidArgument

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


def replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Until ``undo`` is closed ``owner`` has this by that name; then what it had, or inherited, again."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


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
def graphs_refused() -> Iterator[None]:
    """Meanwhile recording and replaying raise InvalidArgument."""
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


@contextlib.contextmanager
def triton_kernels_seen(present: Callable[..., contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Meanwhile the tensors that such a kernel is given are on the device when it is launched, and count as
    written: nobody knows which are."""
    try:
        kind = importlib.import_module("triton.runtime.jit").JITFunction
    except ImportError:
        yield
        return
    run = kind.run

    @functools.wraps(run)
    def launched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        given = [getattr(value, "base", value) for value in (*args, *kwargs.values())]  # of a descriptor
        storages = [tensor.untyped_storage() for tensor in tensors_in(given)]
        with present(storages, written=storages):
            return run(kernel, *args, **kwargs)

    with contextlib.ExitStack() as undo:
        replace(undo, kind, "run", launched)
        yield
