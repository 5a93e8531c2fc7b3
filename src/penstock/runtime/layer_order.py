"""Micro-batches layer by layer: all of them pass a block of the model before the next block begins.

Each part has a thread, of which one runs at a time. Before a block in forward, and where the gradient of its
input is complete in backward, a part hands over to the next one. So each part runs what it runs in a plain
loop, in the same order, and each parameter gets its gradients from part 1, 2, 3 and so on.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo
import torch.utils._python_dispatch as dispatch_modes
from torch import overrides

from penstock.capture.operators import tensors_in
from penstock.errors import InvalidArgument
from penstock.runtime.interrupts import Interrupts
from penstock.runtime.ranks import shared_store

Boundary = tuple[str, int]


class _Stopped(BaseException):
    """Ends the thread of a part after an error elsewhere."""


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that the model repeats: what its outermost lists of modules of one type hold.

    Raises InvalidArgument where there is none, or the model is compiled as a whole.
    """
    found = list(_repeated(model))
    if not found:
        raise InvalidArgument(
            f"{type(model).__name__} has no ModuleList or Sequential of several modules of one type: give "
            'the blocks themselves, or micro_batch_order="part"'
        )
    return found


def _repeated(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    children = list(module.children())
    is_list = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
    if is_list and len(children) > 1 and len(set(map(type, children))) == 1:
        yield from children
        return
    if module._compiled_call_impl is not None or isinstance(module, torch._dynamo.OptimizedModule):
        raise InvalidArgument(
            "parts cannot hand over inside of what torch.compile has made one: compile block by block, or "
            'give micro_batch_order="part"'
        )
    for child in children:
        yield from _repeated(child)


def layer_by_layer(
    bodies: Sequence[Callable[[], Any]], blocks: Iterable[torch.nn.Module], interrupts: Interrupts
) -> list[Any]:
    """Run forward and backward of each part, handing over at the blocks. Returns their results.

    Raises what the first of them raises, and KeyboardInterrupt, when all their threads have ended; and
    InvalidArgument where the parts do not pass the same blocks, or keep something in them.
    """
    if shared_store() is not None:
        raise InvalidArgument(
            'several processes average gradients in the order of parts: give micro_batch_order="part"'
        )
    turns = _Turns(bodies)
    with _handing_over(list(blocks), turns):
        return turns.run(interrupts)


class _Turns:
    """Threads of which one runs at a time. Each goes on from where it handed over, in the order of parts."""

    def __init__(self, bodies: Sequence[Callable[[], Any]]) -> None:
        self._bodies = bodies
        self._turns = [threading.Semaphore(0) for _ in bodies]
        self._going: list[int] = []  # parts whose threads have not ended
        self._route: list[Boundary] = []  # that the first part took
        self._passed = [0] * len(bodies)  # boundaries, by part
        self._own = threading.local()
        self._results: list[Any] = [None] * len(bodies)
        self._error: BaseException | None = None
        self._over = threading.Event()

    def run(self, interrupts: Interrupts) -> list[Any]:
        state = _state_of_this_thread()
        try:
            with interrupts:
                for part in range(len(self._bodies)):
                    inside = contextvars.copy_context()
                    name = f"penstock-part-{part}"
                    threading.Thread(
                        target=inside.run, args=(self._run, part, state), name=name, daemon=True
                    ).start()
                    self._going.append(part)
        except BaseException as error:
            self._error = error
        if self._going:
            self._turns[0].release()
        else:
            self._over.set()
        while not self._over.is_set():
            try:
                self._over.wait()
            except BaseException as error:  # Ctrl-C: at the next boundary all end, one by one
                self._error = self._error or error
        failed, self._error = self._error, None
        self._bodies = ()  # what outlives this, such as a graph with hooks, does not hold them
        try:
            if failed is not None:
                raise failed
        finally:
            del failed  # its frames hold tensors
        return self._results

    def _run(self, part: int, state: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        self._own.part = part
        self._turns[part].acquire()
        try:
            if self._error is None:
                with state():
                    self._results[part] = self._bodies[part]()
                self._require_route_of_the_first(self._passed[part] == len(self._route))
        except _Stopped:
            pass
        except BaseException as error:
            self._error = self._error or error
        finally:
            after = self._after(part)
            self._going.remove(part)
            if self._going:
                self._turns[after].release()
            else:
                self._over.set()

    def hand_over(self, boundary: Boundary) -> None:
        """The part of this thread has come to a boundary: let the next one run. Returns when it is its turn
        again."""
        part = getattr(self._own, "part", None)
        if part is None:
            return
        passed = self._passed[part]
        if part == 0:
            self._route.append(boundary)
        else:
            self._require_route_of_the_first(passed < len(self._route) and self._route[passed] == boundary)
        self._passed[part] += 1
        after = self._after(part)
        if after != part:
            self._turns[after].release()
            self._turns[part].acquire()
        if self._error is not None:
            raise _Stopped

    def _after(self, part: int) -> int:
        return self._going[(self._going.index(part) + 1) % len(self._going)]

    def _require_route_of_the_first(self, holds: bool) -> None:
        if not holds:
            raise InvalidArgument(
                "the parts of the batch pass the model's blocks in different orders, and gradients would be "
                'added up in another order: give micro_batch_order="part"'
            )
        if not self._route:
            raise InvalidArgument(
                'the loss runs none of the blocks: give those that it runs, or micro_batch_order="part"'
            )


@contextlib.contextmanager
def _handing_over(blocks: Sequence[torch.nn.Module], turns: _Turns) -> Iterator[None]:
    """Boundaries before each of the blocks, and after the last one."""

    nothing_kept = False

    @torch.compiler.disable
    def reach(number: int, values: Any) -> None:
        nonlocal nothing_kept
        if torch._C._current_autograd_node() is not None:
            return  # a checkpoint's second forward, amid the backward of this block
        if number == len(blocks) and not nothing_kept:
            _require_nothing_kept(blocks)
            nothing_kept = True
        needed = next((tensor for tensor in tensors_in(values) if tensor.requires_grad), None)
        if needed is not None:
            needed.register_hook(lambda gradient: turns.hand_over(("backward", number)))
        del needed
        turns.hand_over(("forward", number))

    with contextlib.ExitStack() as stack:
        for number, block in enumerate(blocks):
            stack.callback(
                block.register_forward_pre_hook(
                    lambda _, args, kwargs, number=number: reach(number, (args, kwargs)), with_kwargs=True
                ).remove
            )
        stack.callback(
            blocks[-1].register_forward_hook(lambda _, args, result: reach(len(blocks), result)).remove
        )
        yield


def _require_nothing_kept(blocks: Iterable[torch.nn.Module]) -> None:
    for block in blocks:
        for module in block.modules():
            for name, value in vars(module).items():
                if any(tensor.grad_fn is not None for tensor in tensors_in(value)):
                    raise InvalidArgument(
                        f"{type(module).__name__}.{name} holds what one part has computed, and the next part "
                        'overwrites it before it is used: give micro_batch_order="part"'
                    )


def _state_of_this_thread() -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Capture torch's thread-local state. Returns a context manager that sets it in another thread.

    Backward then runs in the thread that calls it, on an accelerator too.
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    casts = [
        (kind, torch.get_autocast_dtype(kind), True, torch.is_autocast_cache_enabled())
        for kind in kinds
        if torch.is_autocast_enabled(kind)
    ]
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    seen = dispatch_modes._get_current_dispatch_mode_stack()
    functions = overrides._get_current_function_mode_stack()
    # Where nobody has used the accelerator so far, it stays untouched.
    used = accelerator is not None and torch.get_device_module(accelerator).is_initialized()
    stream = torch.accelerator.current_stream() if used else None

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if stream is not None:
                torch.accelerator.set_stream(stream)
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for cast in casts:
                stack.enter_context(torch.autocast(*cast))
            if hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
            for function in functions:
                overrides._push_mode(function)
                stack.callback(overrides._pop_mode)
            for mode in seen:
                dispatch_modes._push_mode(mode)
                stack.callback(dispatch_modes._pop_mode, getattr(mode, "_mode_key", None))
            yield

    return entered
