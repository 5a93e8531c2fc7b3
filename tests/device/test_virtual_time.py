"""Virtual time on a machine of round numbers. In the comments, and where a name ends in _ms: milliseconds."""

from __future__ import annotations

import gc
import importlib
import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.runtime import open_runs
from penstock.storage.aligned import AlignedBuffer
from penstock.storage.spill import SpillSpace
from penstock.storage.transfer import DEMAND
from tests.device.test_training_on_a_device_keeps_every_bit import MODELS, TIERS
from tests.support.families import _Gpt
from tests.support.runs import ACCELERATED, Bits, Step, differences, in_memory, offloaded

ORDERS = ["eager", "lazy", "stepped", "random", "newest"]
TO_DEVICE, TO_HOST = "to_device", "to_host"


def round_machine(emu: Any) -> Any:
    """1000 bytes a ms in memory and to the device, 2000 to the host, 500 from the disk and 250 to it.
    Its latency is 0.5. Kernels take 1, launches 0.1."""
    return emu.Machine(
        name="round",
        memory_bytes_per_s=1e6,
        to_device_bytes_per_s=1e6,
        to_host_bytes_per_s=2e6,
        disk_read_bytes_per_s=5e5,
        disk_write_bytes_per_s=2.5e5,
        disk_latency_s=5e-4,
        fp64=1e6,
        fp32=2e6,
        tf32=4e6,
        bf16=8e6,
        kernel_s=1e-3,
        launch_s=1e-4,
    )


@pytest.fixture(autouse=True)
def machine(emu: Any) -> Any:
    made = round_machine(emu)
    emu.configure(machine=made)
    return made


def settled(emu: Any) -> None:
    torch.accelerator.synchronize()
    emu.reset_report()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def approx_ms(expected_ms: float) -> Any:
    return pytest.approx(expected_ms * 1e-3, abs=1e-9)


def late_ms(emu: Any) -> dict[str, float]:
    return {cause: round(1e3 * s, 6) for cause, s in emu.report().idle_s_by_cause.items() if s > 1e-9}


def kernel(content: torch.Tensor, stream: torch.Stream) -> None:
    """Reads and writes each of 500 floats: 4 ms."""
    with stream:
        content.add_(1)


@pytest.mark.parametrize("order", ORDERS)
def test_kernels_of_two_streams_overlap(emu: Any, machine: Any, order: str) -> None:
    emu.configure(machine=machine, order=order)
    main, side = torch.accelerator.current_stream(), torch.Stream(device="emu")
    first, second = (torch.zeros(500, device="emu") for _ in range(2))
    settled(emu)
    kernel(first, main)  # 0.1 to 4.1
    kernel(second, side)  # 0.2 to 4.2
    torch.accelerator.synchronize()
    report = emu.report()
    assert report.step_s == approx_ms(4.2)
    assert report.busy_s == approx_ms(4.1)
    assert late_ms(emu) == {"host": 0.1}


@pytest.mark.parametrize("order", ORDERS)
def test_a_stream_waits_for_an_event_of_another(emu: Any, machine: Any, order: str) -> None:
    emu.configure(machine=machine, order=order)
    main, side = torch.accelerator.current_stream(), torch.Stream(device="emu")
    content = torch.zeros(500, device="emu")
    settled(emu)
    kernel(content, main)  # 0.1 to 4.1
    side.wait_event(main.record_event())
    kernel(content, side)  # 4.1 to 8.1
    torch.accelerator.synchronize()
    assert emu.report().step_s == approx_ms(8.1)
    assert [span.begin_s - emu.spans()[0].begin_s for span in emu.spans()] == [0.0, approx_ms(4)]


def test_a_host_that_waits_is_late(emu: Any) -> None:
    content = torch.zeros(500, device="emu")
    main = torch.accelerator.current_stream()
    settled(emu)
    kernel(content, main)  # 0.1 to 4.1
    main.synchronize()
    kernel(content, main)  # 4.2 to 8.2
    kernel(content, main)  # 8.2 to 12.2: it was launched in time
    report = emu.report()
    assert report.step_s == approx_ms(12.2)
    assert report.busy_s == approx_ms(12)
    assert late_ms(emu) == {"host": 0.2}
    assert (report.waits, report.waited_s) == (1, approx_ms(4))


@pytest.mark.parametrize("order", ORDERS)
def test_copies_of_a_link_go_one_after_another(emu: Any, machine: Any, order: str) -> None:
    emu.configure(machine=machine, order=order)
    streams = [torch.Stream(device="emu") for _ in range(3)]
    there = [torch.zeros(1000, device="emu") for _ in streams]
    here = [torch.zeros(1000).pin_memory() for _ in streams]
    settled(emu)
    for stream, source, target in zip(streams[:2], here, there, strict=False):
        with stream:
            target.copy_(source, non_blocking=True)  # 0.1 to 4.1 to 8.1, on two streams
    with streams[2]:
        here[2].copy_(there[2], non_blocking=True)  # 0.3 to 2.3, the other way
    torch.accelerator.synchronize()
    report = emu.report()
    assert report.step_s == approx_ms(8.1)
    assert (report.to_device.copies, report.to_device.size_bytes) == (2, 8000)
    assert report.to_device.busy_s == approx_ms(8)
    assert report.to_host.busy_s == approx_ms(2)
    ends_s = [span.end_s - emu.spans()[0].begin_s for span in emu.spans()]
    assert ends_s == [approx_ms(4), approx_ms(8), approx_ms(2.2)]


def test_a_copy_takes_a_gap_of_its_link(emu: Any) -> None:
    """What was launched first is not ready first."""
    main, *copying = torch.accelerator.current_stream(), *(torch.Stream(device="emu") for _ in range(2))
    content, *there = (torch.zeros(500, device="emu") for _ in range(3))
    here = torch.zeros(500).pin_memory()
    settled(emu)
    kernel(content, main)  # 0.1 to 4.1
    copying[0].wait_event(main.record_event())
    for stream, target in zip(copying, there, strict=True):
        with stream:
            target.copy_(here, non_blocking=True)  # 4.1 to 6.1, and 0.3 to 2.3
    torch.accelerator.synchronize()
    begins_s = [span.begin_s - emu.spans()[0].begin_s for span in emu.spans()]
    assert begins_s == [0.0, approx_ms(4), approx_ms(0.2)]
    assert emu.report().step_s == approx_ms(6.1)


@pytest.mark.parametrize(("way", "cause"), [(TO_DEVICE, "copies"), (TO_HOST, "memory")])
@pytest.mark.parametrize("waits", ["stream", "host"])
def test_what_a_kernel_was_late_for(emu: Any, way: str, cause: str, waits: str) -> None:
    main, side = torch.accelerator.current_stream(), torch.Stream(device="emu")
    content, there = (torch.zeros(500, device="emu") for _ in range(2))
    here = torch.zeros(500).pin_memory()
    settled(emu)
    kernel(content, main)  # 0.1 to 4.1
    side.wait_event(main.record_event())
    with side:
        target, source = (there, here) if way == TO_DEVICE else (here, there)
        target.copy_(source, non_blocking=True)  # 4.1 to 6.1, or to the host to 5.1
    event = side.record_event()
    if waits == "stream":
        main.wait_event(event)
    else:
        event.synchronize()
    kernel(content, main)
    report = emu.report()
    copied_ms = 2.0 if way == TO_DEVICE else 1.0
    late = {"host": 0.1 if waits == "stream" else 0.2, cause: copied_ms}
    assert late_ms(emu) == late
    assert report.step_s == approx_ms(8 + sum(late.values()))
    assert getattr(report, way).limiting_gaps_s == approx_ms(0)


def test_a_link_has_gaps_while_it_is_waited_for(emu: Any) -> None:
    """A copy that was launched only when it was needed."""
    main, side = torch.accelerator.current_stream(), torch.Stream(device="emu")
    content = torch.zeros(500, device="emu")
    here = torch.zeros(500).pin_memory()
    settled(emu)
    main.synchronize()
    with side:
        content.copy_(here, non_blocking=True)  # 0.1 to 2.1
    main.wait_event(side.record_event())
    kernel(content, main)
    report = emu.report()
    assert late_ms(emu) == {"copies": 2.1}
    assert report.to_device.limiting_gaps_s == approx_ms(0.1)


def test_an_allocator_without_room_waits_for_the_device(emu: Any, machine: Any) -> None:
    emu.configure(memory="22MiB", machine=machine)
    side = torch.Stream(device="emu")
    content = torch.zeros(1 << 20, dtype=torch.uint8, device="emu")
    here = torch.zeros(1 << 20, dtype=torch.uint8).pin_memory()
    settled(emu)
    content.copy_(here, non_blocking=True)  # 0.1 to 1048.676
    torch.empty(2 << 20, dtype=torch.uint8, device="emu")
    with side:  # what is free is in a segment of the main stream's
        torch.zeros(2 << 20, dtype=torch.uint8, device="emu")
    assert late_ms(emu) == {"host": 0.2, "memory": 1048.576}
    assert emu.report().waited_s == approx_ms(1048.576)


def test_who_polls_gets_there(emu: Any) -> None:
    content = torch.zeros(500, device="emu")
    settled(emu)
    kernel(content, torch.accelerator.current_stream())  # 0.1 to 4.1
    event = torch.accelerator.current_stream().record_event()
    while not event.query():
        pass
    kernel(content, torch.accelerator.current_stream())
    assert emu.report().waited_s == approx_ms(4)
    assert emu.report().step_s == approx_ms(8.2)


def test_events_are_in_virtual_time(emu: Any) -> None:
    content = torch.zeros(500, device="emu")
    first, second = (torch.Event(device="emu", enable_timing=True) for _ in range(2))
    settled(emu)
    first.record()
    content.add_(1)
    second.record()
    second.synchronize()
    assert first.elapsed_time(second) == pytest.approx(4.1)


def test_a_helper_hands_its_time_to_who_waits_for_it(emu: Any) -> None:
    content = torch.zeros(500, device="emu")
    side = torch.Stream(device="emu")
    settled(emu)
    kernel(content, side)  # 0.1 to 4.1
    event = side.record_event()
    is_over = threading.Event()

    def wait() -> None:
        event.synchronize()
        is_over.set()

    helper = threading.Thread(target=wait)
    helper.start()
    is_over.wait()
    kernel(content, torch.accelerator.current_stream())  # 4.2 to 8.2
    helper.join()
    report = emu.report()
    assert report.step_s == approx_ms(8.2)
    assert report.early == 0


@pytest.mark.parametrize("sizes", list(itertools.permutations([500, 2000, 4000])))
def test_helpers_go_on_in_the_order_of_virtual_time(emu: Any, sizes: tuple[int, ...]) -> None:
    """Of three that wait for streams that take 4, 16 and 32."""
    streams = [torch.Stream(device="emu") for _ in sizes]
    contents = [torch.zeros(size, device="emu") for size in sizes]
    begin = torch.accelerator.current_stream().record_event()
    settled(emu)
    events = []
    for content, stream in zip(contents, streams, strict=True):
        kernel(content, stream)
        events.append(stream.record_event())
    begun: list[int] = []
    seen: list[int] = []
    go, changed = threading.Event(), threading.Condition()

    def note(number: int, there: list[int]) -> None:
        with changed:
            there.append(number)
            changed.notify()

    def wait(number: int) -> None:
        begin.synchronize()  # a helper is who has waited for the device
        note(number, begun)
        go.wait()
        events[number].synchronize()
        note(number, seen)

    helpers = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
    for helper in helpers:
        helper.start()
    with changed:
        changed.wait_for(lambda: len(begun) == 3)
    go.set()
    with changed:
        changed.wait_for(lambda: len(seen) == 3)
    for helper in helpers:
        helper.join()
    assert [sizes[number] for number in seen] == [500, 2000, 4000]
    assert emu.report().step_s == approx_ms(0.1 * (1 + sizes.index(4000)) + 32)


def products() -> list[tuple[str, Callable[[Any], object], float]]:
    """What runs, given a function that makes tensors, and its ms."""
    return [
        ("mm", lambda made: made(20, 30) @ made(30, 40), 2 * 20 * 30 * 40 / 2e3),
        ("addmm", lambda made: torch.addmm(made(40), made(20, 30), made(30, 40)), 2 * 20 * 30 * 40 / 2e3),
        ("bmm", lambda made: made(3, 20, 30) @ made(3, 30, 40), 3 * 2 * 20 * 30 * 40 / 2e3),
        ("linear", lambda made: F.linear(made(2, 20, 30), made(40, 30)), 2 * 2 * 20 * 30 * 40 / 2e3),
        ("half", lambda made: made(20, 30).bfloat16() @ made(30, 40).bfloat16(), 2 * 20 * 30 * 40 / 8e3),
        ("convolution", lambda made: F.conv2d(made(2, 4, 8, 8), made(6, 4, 3, 3)), 2 * 2 * 6 * 36 * 36 / 4e3),
        (
            "grouped",
            lambda made: F.conv2d(made(2, 4, 8, 8), made(6, 2, 3, 3), groups=2),
            2 * 2 * 6 * 36 * 18 / 4e3,
        ),
        (
            "transposed",
            lambda made: F.conv_transpose2d(made(2, 4, 8, 8), made(4, 6, 3, 3)),
            2 * 2 * 4 * 64 * 54 / 4e3,
        ),
    ]


@pytest.mark.parametrize("name", [name for name, _, _ in products()])
def test_products_take_their_operations(emu: Any, machine: Any, name: str) -> None:
    emu.configure(machine=replace(machine, memory_bytes_per_s=1e9))
    run, expected_ms = next((run, ms) for other, run, ms in products() if other == name)
    before = run(lambda *sizes: torch.ones(sizes, device="emu"))
    settled(emu)
    run(lambda *sizes: torch.ones(sizes, device="emu"))
    assert before is not None
    assert max(span.end_s - span.begin_s for span in emu.spans()) == approx_ms(expected_ms)


def test_backward_of_a_convolution_takes_twice_the_operations(emu: Any) -> None:
    images = torch.ones(2, 4, 8, 8, device="emu", requires_grad=True)
    weight = torch.ones(6, 4, 3, 3, device="emu", requires_grad=True)
    made = F.conv2d(images, weight)
    settled(emu)
    made.sum().backward()
    found = [span for span in emu.spans() if "convolution_backward" in span.name]
    assert [span.end_s - span.begin_s for span in found] == [approx_ms(2 * 2 * 2 * 6 * 36 * 36 / 4e3)]


def test_other_kernels_take_their_bytes(emu: Any) -> None:
    content = torch.ones(1000, device="emu")
    table, rows = torch.ones(1000, 10, device="emu"), torch.arange(5, device="emu")
    settled(emu)
    content.zero_()
    torch.add(content, content)
    content.expand(4, 1000).sum()
    F.embedding(rows, table)
    took_ms = [round(1e3 * (span.end_s - span.begin_s), 6) for span in emu.spans()]
    assert took_ms == [4, 8, 4.004, 1]  # the last one: 40 + 200 + 200 bytes


def test_kernels_on_lists_are_launched_together(emu: Any) -> None:
    lists = [[torch.zeros(25, device="emu") for _ in range(72)] for _ in range(2)]
    settled(emu)
    begun_s = emu.now_s()
    torch._foreach_add_(*lists)  # two launches of 36 tensors each: 0.1 to 1.1, and 35 times 0.3; and again
    assert emu.now_s() - begun_s == approx_ms(0.2)
    torch.accelerator.synchronize()
    assert emu.now_s() - begun_s == approx_ms(0.1 + 2 * (1 + 35 * 0.3))
    assert torch.equal(lists[0][71].cpu(), torch.zeros(25))


def test_a_program_of_several_threads_has_one_clock(emu: Any) -> None:
    """Backward runs on a thread of autograd's."""
    weight = torch.ones(500, device="emu", requires_grad=True)
    settled(emu)
    (weight * 2).sum().backward()
    torch.accelerator.synchronize()
    launched_s = [span.launched_s for span in emu.spans()]
    assert launched_s == sorted(launched_s)
    assert launched_s[-1] - launched_s[0] == approx_ms(0.1 * (len(launched_s) - 1))


def test_without_a_machine_there_is_no_virtual_time(emu: Any) -> None:
    emu.configure()
    torch.zeros(500, device="emu").add_(1)
    torch.accelerator.synchronize()
    assert emu.spans() == []
    with pytest.raises(RuntimeError, match="name a machine"):
        emu.report()
    with pytest.raises(ValueError, match="choose one of h100-pcie5, rtx4090-pcie4"):
        emu.configure(machine="abacus")


def test_what_computes_nothing_takes_as_long_and_touches_no_memory(emu: Any) -> None:
    def took_s(computes: bool, width: int) -> float:
        emu.configure("40GiB", machine="h100-pcie5", computes=computes)
        weight = torch.zeros(width, width, device="emu")
        host = torch.zeros(256, 256).pin_memory()
        settled(emu)
        made = weight.mm(weight).relu_()
        host.copy_(made[:256, :256], non_blocking=True)
        assert not made.sum().item()
        return float(emu.report().step_s)

    assert took_s(False, 256) == took_s(True, 256)
    before_bytes = resident_bytes()
    assert took_s(False, 1 << 16) > 1  # of 3 matrices of 16 GiB
    assert resident_bytes() < before_bytes + (64 << 20)


@pytest.fixture
def disk(emu: Any) -> str:
    """The I/O path to the disk of virtual time."""
    return str(importlib.import_module("emu.disk").DISK)


def test_the_disk_has_its_rates_beside_kernels(emu: Any, disk: str, tmp_path: Path) -> None:
    content = torch.zeros(500, device="emu")
    over: queue.Queue[Any] = queue.Queue()
    buffer = AlignedBuffer(3 * 4096)
    with SpillSpace(tmp_path, penstock.IoOptions(paths=[disk])) as spill:
        memory = [(buffer.address + 4096 * number, 4096, buffer) for number in range(3)]
        extents = [spill.allocate(4096) for _ in memory]
        spill.write(extents[0], *memory[0], over.put)
        assert over.get().error is None
        settled(emu)
        begun_s = emu.now_s()
        for extent, part in zip(extents[1:], memory[1:], strict=True):
            spill.write(extent, *part, over.put, priority=DEMAND)  # 0.5 to 16.884 to 33.268
        spill.read(extents[0], *memory[0], over.put)  # 0.5 to 8.692
        kernel(content, torch.accelerator.current_stream())  # 0.1 to 4.1
        ends_ms = []
        for _ in range(3):
            transfer = over.get()
            assert transfer.error is None
            ends_ms.append((transfer.kind, round(1e3 * (emu.now_s() - begun_s), 6)))
    assert ends_ms == [("read", 8.692), ("write", 16.884), ("write", 33.268)]
    report = emu.report()
    assert report.disk_write.busy_s == approx_ms(2 * 16.384)
    assert report.disk_read.busy_s == approx_ms(8.192)
    assert report.busy_s == approx_ms(4)


def test_what_goes_through_the_disk_is_away_while_kernels_run(
    emu: Any, machine: Any, disk: str, tmp_path: Path
) -> None:
    """Kernels take 10, and a chunk of staging 8.4 on the disk and 0.2 on the bus."""
    emu.configure(
        machine=replace(
            machine,
            memory_bytes_per_s=1e12,
            kernel_s=1e-2,
            fp32=1e12,
            tf32=1e12,
            to_device_bytes_per_s=4e10,
            to_host_bytes_per_s=4e10,
            disk_read_bytes_per_s=1e9,
            disk_write_bytes_per_s=1e9,
        ),
        computes=False,
    )

    def program(step: Step) -> Bits:
        with torch.device("emu"):
            model = torch.nn.Sequential(*(torch.nn.Linear(1500, 1500) for _ in range(6)))
            batch = torch.zeros(100, 1500)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        engine = open_runs.opened[0]._engine
        for _ in range(6):
            with engine.lock:
                while any(engine.in_flight_bytes):  # a step may begin with what the one before has asked for
                    engine._wait_for_copy()
            settled(emu)
            with step():
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.accelerator.synchronize()
        return []

    offloaded(
        program,
        "128MiB",
        tmp_path,
        device="emu:0",
        hardware=ACCELERATED,
        host_budget=TIERS["disk"],
        io=penstock.IoOptions(paths=[disk]),
    )
    report, spans = emu.report(), emu.spans()
    assert report.disk_read.size_bytes > 64 << 20
    assert report.step_s < 1.1 * report.busy_s
    by_kind = {kind: [s for s in spans if s.kind == kind and s.size_bytes > 1 << 20] for kind in report.links}
    for came, went in (("disk_read", TO_DEVICE), (TO_HOST, "disk_write")):
        ended_s = sorted(span.end_s for span in by_kind[came])  # chunks of several tensors take turns
        launched_s = sorted(span.launched_s for span in by_kind[went])
        assert all(end_s <= then_s + 1e-9 for end_s, then_s in zip(ended_s, launched_s, strict=True))


@pytest.mark.parametrize(("order", "tier"), [("random", "host"), ("lazy", "disk")])
def test_training_inside_a_budget_keeps_its_bits(
    emu: Any, disk: str, order: str, tier: str, tmp_path: Path
) -> None:
    program = MODELS["foreach"]  # which needs more than it gets, whatever is planned
    emu.configure(machine="h100-pcie5")
    expected = in_memory(program)
    plain = emu.report()
    gc.collect()
    torch.accelerator.empty_cache()
    emu.configure(order=order, machine="h100-pcie5")
    found, _ = offloaded(
        program,
        "8MiB",
        tmp_path,
        device="emu:0",
        hardware=ACCELERATED,
        host_budget=TIERS[tier],
        io=penstock.IoOptions(paths=[disk]),
    )
    report = emu.report()
    assert differences(expected, found) == []
    assert report.to_host.copies > plain.to_host.copies
    assert report.to_device.copies > plain.to_device.copies
    assert (report.disk_read.copies > 0) == (tier == "disk")
    assert report.busy_s > 0


@pytest.mark.parametrize(("order", "budget"), [("random", "96MiB"), ("lazy", "6MiB")])
def test_ideal_s_is_what_a_plain_step_takes(
    emu: Any, machine: Any, order: str, budget: str, tmp_path: Path
) -> None:
    """Also where recorded steps wait for what moves. Kernels take seconds: the host's own time is nothing."""
    links = {"to_device_bytes_per_s": 1e4, "to_host_bytes_per_s": 1e4}
    slow = replace(machine, kernel_s=1.0, fp32=1e8, tf32=1e8, **links)
    steps_s: list[float] = []

    def program(step: Step) -> Bits:
        with torch.device("emu"):
            model = _Gpt(width=128, blocks=2)
            words = torch.zeros(4, 32, dtype=torch.int64)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)  # lists would be divided
        for _ in range(5):  # all of them recorded
            settled(emu)
            with step():
                F.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.accelerator.synchronize()
            steps_s.append(emu.report().step_s)
        return []

    emu.configure(order=order, machine=slow, computes=False)
    in_memory(program)
    plain_s = steps_s[-1]
    gc.collect()
    torch.accelerator.empty_cache()
    emu.configure(order=order, machine=slow, computes=False)
    _, report = offloaded(
        program, budget, tmp_path, device="emu:0", hardware=ACCELERATED, host_budget=TIERS["host"]
    )
    assert (steps_s[-1] > 2 * plain_s) == (budget == "6MiB")
    assert report.ideal_s == pytest.approx(plain_s, rel=0.01)


ITEMS = st.lists(
    st.tuples(
        st.sampled_from(["kernel", TO_DEVICE, TO_HOST, "wait", "host waits"]),
        st.integers(0, 2),
        st.integers(0, 2),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=60)
@given(items=ITEMS, order=st.sampled_from(ORDERS))
def test_time_lies_between_its_bounds(items: list[tuple[str, int, int]], order: str) -> None:
    import emu

    emu.configure(machine=round_machine(emu), order=order)
    streams = [torch.Stream(device="emu") for _ in range(3)]
    there = [torch.zeros(250 << number, device="emu") for number in range(3)]
    here = [torch.zeros(250 << number).pin_memory() for number in range(3)]
    settled(emu)
    for what, one, other in items:
        stream = streams[one]
        if what == "kernel":
            kernel(there[other], stream)
        elif what == "wait":
            stream.wait_event(streams[other].record_event())
        elif what == "host waits":
            stream.synchronize()
        else:
            target, source = (there, here) if what == TO_DEVICE else (here, there)
            with stream:
                target[other].copy_(source[other], non_blocking=True)
    torch.accelerator.synchronize()
    report, spans = emu.report(), emu.spans()
    took_s = [span.end_s - span.begin_s for span in spans]
    slack_s = 1e-9
    assert report.step_s >= report.to_device.size_bytes / 1e6 - slack_s
    assert report.step_s >= report.to_host.size_bytes / 2e6 - slack_s
    for stream in {span.stream for span in spans}:
        on_stream = [span for span in spans if span.stream == stream]
        assert report.step_s >= sum(span.end_s - span.begin_s for span in on_stream) - slack_s
        assert all(a.end_s <= b.begin_s + slack_s for a, b in itertools.pairwise(on_stream))
    for way in (TO_DEVICE, TO_HOST):
        on_link = sorted((s for s in spans if s.kind == way), key=lambda span: span.begin_s)
        assert all(a.end_s <= b.begin_s + slack_s for a, b in itertools.pairwise(on_link))
    assert report.step_s <= sum(took_s) + 1e-4 * len(spans) + slack_s
    assert report.busy_s + sum(report.idle_s_by_cause.values()) == pytest.approx(report.step_s)
    assert -slack_s <= report.busy_s <= sum(took_s) + slack_s
