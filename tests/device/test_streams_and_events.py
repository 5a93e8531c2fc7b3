"""Work is carried out in any order that streams and events allow: who forgets to wait sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.accelerator import orders, wanted

DEVICE = wanted("emu")
HOSTILE = orders(DEVICE, "lazy", "stepped", "random", "newest")
ORDERS = orders(DEVICE, "eager", "lazy", "stepped", "random", "newest")
Configure = Callable[..., None]
REPEATABLE = ["lazy", "stepped", "newest"]  # with one thread of the host
SEEDS = range(12)


def is_copied_right(waits: bool) -> bool:
    """A copy to the host on another stream than the kernel that makes its source."""
    side = torch.Stream(device=DEVICE)
    made = torch.full((64, 64), 2.0, device=DEVICE)
    torch.accelerator.synchronize()
    event = torch.Event(device=DEVICE)
    squared = made @ made
    event.record()
    if waits:
        side.wait_event(event)
    host = torch.empty(64, 64).pin_memory()
    with side:
        host.copy_(squared, non_blocking=True)
    side.synchronize()
    right = bool((host == 256).all())
    torch.accelerator.synchronize()
    return right


def is_reused_right(waits: bool) -> bool:
    """A page-locked source that is written again, once the host has waited for the copy of its content."""
    host = torch.ones(256).pin_memory()
    torch.zeros(64, device=DEVICE)
    there = host.to(DEVICE, non_blocking=True)
    if waits:
        torch.accelerator.current_stream().synchronize()
    host.fill_(7)
    return bool((there == 1).all())


def is_ordered_right(waits: bool) -> bool:
    """A kernel of the main stream that reads what another stream writes."""
    side = torch.Stream(device=DEVICE)
    shared = torch.zeros(4096, device=DEVICE)
    side.wait_event(torch.accelerator.current_stream().record_event())
    with side:
        shared.add_(1)
    if waits:
        torch.accelerator.current_stream().wait_event(side.record_event())
    result = shared * 2
    right = bool((result == 2).all())
    torch.accelerator.synchronize()
    return right


PROGRAMS = [is_copied_right, is_reused_right, is_ordered_right]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_who_waits_is_right_in_every_order(
    configure: Configure, program: Callable[[bool], bool], order: str
) -> None:
    for seed in SEEDS:
        configure(order=order, seed=seed)
        assert program(True)


@pytest.mark.parametrize("order", REPEATABLE)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_missing_wait_is_seen(emu: Any, program: Callable[[bool], bool], order: str) -> None:
    def found(seed: int) -> bool:
        emu.configure(order=order, seed=seed)
        return program(False)

    assert not all(found(seed) for seed in SEEDS)


def test_lazy_never_hides_a_missing_wait(emu: Any) -> None:
    for seed in SEEDS:
        emu.configure(order="lazy", seed=seed)
        assert not is_copied_right(False)


@pytest.mark.parametrize("order", ["stepped", "newest"])
def test_a_seed_repeats_its_order(emu: Any, order: str) -> None:
    def order_of(seed: int) -> list[float]:
        """Three streams append their numbers to one list, without waiting for each other."""
        emu.configure(order=order, seed=seed)
        streams = [torch.Stream(device=DEVICE) for _ in range(3)]
        trail = torch.zeros((), dtype=torch.float64, device=DEVICE)
        torch.accelerator.synchronize()
        for _ in range(8):
            for digit, stream in enumerate(streams, start=1):
                with stream:
                    trail.mul_(4)
                    trail.add_(digit)
        torch.accelerator.synchronize()
        return trail.tolist()

    trails = [order_of(seed) for seed in range(8)]
    assert trails == [order_of(seed) for seed in range(8)]
    assert len(set(map(str, trails))) > 4


def test_nothing_runs_lazily_until_somebody_waits(emu: Any) -> None:
    emu.configure(order="lazy")
    before = emu.counters()
    side = torch.Stream(device=DEVICE)
    made = torch.ones(64, device=DEVICE) + 1
    with side:
        other = torch.ones(64, device=DEVICE) + 1
    after = emu.counters()
    assert after["executed"] == before["executed"] and after["launched"] > before["launched"]
    assert float(made.sum()) == 128  # not the other stream's
    with side:
        assert float(other.sum()) == 128


def test_the_newest_work_goes_first(emu: Any) -> None:
    """What a host waits for is done last, and what came last is done first."""
    emu.configure(order="newest")
    seen = torch.zeros(1, device=DEVICE)
    torch.accelerator.synchronize()
    streams = [torch.Stream(device=DEVICE) for _ in range(4)]
    late = 0
    for _ in range(12):
        for stream in streams:
            with stream:
                seen.add_(1)
        streams[-1].synchronize()
        late += int(float(seen.cpu()) % 4 == 0)  # the three others were there before
    assert late == 12


def test_events_know_when_they_are_reached(configure: Configure) -> None:
    configure(order="lazy")
    first, last = (torch.Event(device=DEVICE, enable_timing=True) for _ in range(2))
    first.record()
    torch.ones(256, 256, device=DEVICE) @ torch.ones(256, 256, device=DEVICE)
    last.record()
    while not last.query():  # who polls gets there, too
        pass
    assert first.query() and first.elapsed_time(last) > 0
    while not torch.accelerator.current_stream().query():
        pass


def test_an_error_of_a_kernel_is_raised_by_a_later_wait(emu: Any) -> None:
    emu.configure(order="lazy")
    torch.zeros(4, device=DEVICE)[torch.full((2,), 99, device=DEVICE)]
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()  # it was told


@pytest.mark.parametrize("order", HOSTILE)
def test_host_threads_have_streams_of_their_own(configure: Configure, order: str) -> None:
    configure(order=order, seed=1, host_delay_us=50)
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            with torch.Stream(device=DEVICE):
                for _ in range(30):
                    x = torch.full((32, 32), float(number)).to(DEVICE, non_blocking=True)
                    if (found := (x @ x).sum().item()) != 32**3 * number**2:
                        wrong.append(found)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("order", HOSTILE)
def test_backward_follows_the_streams_of_forward(configure: Configure, order: str) -> None:
    weight = torch.randn(32, 32)

    def gradient(side: Any, main: Any) -> torch.Tensor:
        leaf = weight.clone().to(DEVICE).requires_grad_()
        if side is None:
            hidden = (leaf @ leaf).relu()
        else:
            side.wait_stream(main)
            with side:
                hidden = (leaf @ leaf).relu()
            main.wait_stream(side)
        (hidden * leaf).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.cpu()

    expected = gradient(None, None)
    for seed in SEEDS:
        configure(order=order, seed=seed)
        main = torch.accelerator.current_stream()
        assert torch.equal(gradient(torch.Stream(device=DEVICE), main), expected)


@pytest.mark.parametrize("order", HOSTILE)
def test_random_numbers_do_not_depend_on_the_order(configure: Configure, order: str) -> None:
    def drawn(order: str) -> list[float]:
        configure(order=order, seed=3)
        torch.manual_seed(5)
        x = torch.nn.functional.dropout(torch.ones(100, device=DEVICE), 0.5)
        return [*x.tolist(), *torch.randn(5, device=DEVICE).tolist(), *torch.rand(5, device=DEVICE).tolist()]

    assert drawn(order) == drawn("eager")


@pytest.mark.skipif(DEVICE == "cuda", reason="CUDA does not say")
def test_an_event_is_not_recorded_while_a_thread_waits_for_it(configure: Configure) -> None:
    """It would wait for something else then, or for ever."""

    def is_refused() -> bool:
        event, made = torch.Event(device=DEVICE), torch.ones(1024, 1024, device=DEVICE)
        for _ in range(8):
            made = made @ made
        event.record()
        waiting = threading.Thread(target=event.synchronize)
        waiting.start()
        try:
            while waiting.is_alive():
                event.record()
        except RuntimeError as error:
            return "recorded again while a thread of the host waits" in str(error)
        finally:
            waiting.join()
        return False

    configure(order="lazy")
    assert any(is_refused() for _ in range(20))  # the thread may be the faster one
