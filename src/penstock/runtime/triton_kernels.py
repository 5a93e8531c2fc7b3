"""Kernels of Triton that the program launches itself, in a run on an accelerator: torch sees none of them."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

from penstock.capture.operators import tensors_in
from penstock.runtime.replacing import replace
from penstock.runtime.storage_methods import Clock


@contextlib.contextmanager
def seen(clock: Clock) -> Iterator[None]:
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
        with clock.present(storages, written=storages):
            return run(kernel, *args, **kwargs)

    with contextlib.ExitStack() as undo:
        replace(undo, kind, "run", launched)
        yield
