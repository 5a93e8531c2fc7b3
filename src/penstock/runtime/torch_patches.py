"""Patches of torch and Triton while a run is open.

On an accelerator CUDA graphs are refused: they replay kernels with recorded addresses, which change when
tensors are evicted. Triton kernels that the program launches are intercepted, as dispatch modes do not see
them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch._inductor.config as inductor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from penstock.capture.operators import tensors_in
from penstock.errors import InvalidArgument

# What records or replays graphs: an object of torch, and its attributes.
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
    """Set an attribute until ``undo`` is closed, which restores the old value, or the inherited one."""
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
    """A torch._inductor.cudagraph_utils.CUDAGraphPolicy that refuses graphs of torch.compile."""

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
def cuda_graphs_refused() -> Iterator[None]:
    """Inside, recording or replaying a graph raises InvalidArgument."""
    with contextlib.ExitStack() as undo:
        for path, names in _ENTRIES:
            module, _, kind = path.partition(".")
            owner: Any = importlib.import_module(f"torch.{module}")
            owner = getattr(owner, kind, None) if kind else owner
            for name in names:
                if hasattr(owner, name):
                    replace(undo, owner, name, _refusal(f"torch.{path}", name))
        if hasattr(inductor, "cudagraph_policy"):
            undo.enter_context(inductor.patch("cudagraph_policy", _NoGraphs()))
        else:  # an older torch without policies
            compiler = importlib.import_module("torch._inductor.compile_fx")
            replace(undo, compiler, "cudagraphify", _NoGraphs().cudagraphify)
        yield


def _refusal(path: str, name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        _refuse(path if name == "__enter__" else f"{path}.{name}", "Run the kernels without one.")

    return refuse


@contextlib.contextmanager
def compiled_regions_seen() -> Iterator[None]:
    """Inside, a region that Inductor compiled before is one operator, as one that is compiled in a run."""
    graph = importlib.import_module("torch._inductor.output_code").CompiledFxGraph
    operators = importlib.import_module("torch._higher_order_ops.wrap")
    wrapped = getattr(operators, "InductorCompiledCallable", lambda function: function)
    call = graph.__call__

    @functools.wraps(call)
    def called(region: Any, inputs: Any) -> Any:
        if region._wrap_compiled_regions or not is_in_torch_dispatch_mode():
            return call(region, inputs)
        return operators.inductor_compiled_code(wrapped(functools.partial(call, region)), inputs)

    with contextlib.ExitStack() as undo:
        replace(undo, graph, "__call__", called)
        yield


@contextlib.contextmanager
def triton_launches_seen(present: Callable[..., contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, the tensors passed to a Triton kernel are on the device at its launch. All count as written:
    nothing declares which are."""
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
        with present(storages, written=storages, launched=True):
            return run(kernel, *args, **kwargs)

    with contextlib.ExitStack() as undo:
        replace(undo, kind, "run", launched)
        yield
