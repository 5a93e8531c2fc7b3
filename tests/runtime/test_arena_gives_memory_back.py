"""The arena: torch's CPU tensors, aligned, exact, and returned to the system when they are freed."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from penstock import _native
from penstock.runtime import arena
from tests.runtime.paging import Limits
from tests.support import apart

if arena.unavailable() is not None:
    pytest.skip(f"no arena here: {arena.unavailable()}", allow_module_level=True)

MIB = 1 << 20
LARGE = 1 << 40


@pytest.fixture
def lease() -> Iterator[Limits]:
    with Limits(LARGE) as lease:
        yield lease


def counters() -> arena.ArenaStats:
    stats = arena.stats()
    assert stats is not None
    return stats


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def python(code: str, **environment: str) -> str:
    """Run ``code`` in a process of its own; give what it printed."""
    result = apart.python(code, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_tensors_are_aligned_for_direct_io(lease: Limits) -> None:
    tensors = [torch.empty(size, dtype=torch.uint8) for size in (4096, 4097, 100_000, MIB, 3 * MIB + 5)]
    for tensor in tensors:
        assert tensor.data_ptr() % 4096 == 0
        found = _native.arena_block(tensor.data_ptr() + tensor.numel() - 1)
        assert found is not None
        start, capacity_bytes, _ = found
        assert start == tensor.data_ptr()
        assert capacity_bytes == -(-tensor.numel() // 4096) * 4096


def test_small_tensors_and_those_from_before_are_not_in_the_arena() -> None:
    before = torch.empty(MIB)
    with Limits(LARGE):
        assert _native.arena_block(before.data_ptr()) is None
        assert _native.arena_block(torch.empty(4095, dtype=torch.uint8).data_ptr()) is None
        del before
    assert _native.arena_block(0) is None


def test_bytes_in_use_are_exact(lease: Limits) -> None:
    base = counters().in_use_bytes
    sizes = [4096, 10_001, 5 * MIB + 3, MIB]
    tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    assert counters().in_use_bytes - base == sum(sizes)
    _native.arena_reset_peak()
    peak = torch.empty(8 * MIB, dtype=torch.uint8)
    del peak, tensors[2]
    assert counters().in_use_bytes - base == sum(sizes) - sizes[2]
    assert (counters().new_bytes, counters().peak_new_bytes) == (0, 8 * MIB)
    _native.arena_reset_peak()
    assert (counters().new_bytes, counters().peak_new_bytes) == (0, 0)
    tensors.clear()
    assert counters().in_use_bytes == base


def test_every_block_has_a_serial_number_of_its_own(lease: Limits) -> None:
    def serial(tensor: torch.Tensor) -> int:
        found = _native.arena_block(tensor.data_ptr())
        assert found is not None
        return found[2]

    first = torch.empty(MIB)
    address, number = first.data_ptr(), serial(first)
    del first
    second = torch.empty(MIB)
    assert second.data_ptr() == address, "an exact fit is used again"
    assert serial(second) > number
    assert counters().serial == serial(second)


def test_contents_survive_what_other_threads_do(lease: Limits) -> None:
    failures: list[str] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        held: list[tuple[torch.Tensor, int]] = []
        for _ in range(400):
            if held and draw.random() < 0.5:
                tensor, value = held.pop(draw.randrange(len(held)))
                if not bool((tensor == value).all()):
                    failures.append(f"thread {seed}: not {value}")
            else:
                value = draw.randrange(256)
                size = int(4096 * 2 ** draw.uniform(0, 9))
                held.append((torch.full((size,), value, dtype=torch.uint8), value))
            if draw.random() < 0.05:
                _native.arena_trim()

    base = counters().in_use_bytes
    lease.set_limit(4 * MIB)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert counters().in_use_bytes == base


def test_freed_memory_goes_back_to_the_system() -> None:
    with Limits(LARGE):
        before = resident_bytes()
        tensors = [torch.ones(8 * MIB, dtype=torch.uint8) for _ in range(16)]
        full = resident_bytes()
        assert full - before >= 120 * MIB
        tensors.clear()
        assert counters().resident_bytes >= 128 * MIB, "kept for reuse below the limit"
        _native.arena_trim()
        assert resident_bytes() - before <= 8 * MIB
        assert counters().purged_bytes >= 120 * MIB


def test_closing_the_last_lease_returns_free_memory() -> None:
    with Limits(LARGE):
        tensor = torch.ones(64 * MIB, dtype=torch.uint8)
        del tensor
        full = resident_bytes()
    assert full - resident_bytes() >= 56 * MIB


def rounded(size_bytes: int) -> int:
    """What a tensor takes of memory: whole grains of 32 KiB from 256 KiB on, else whole pages."""
    unit = 32 << 10 if size_bytes > (256 << 10) - 4096 else 4096
    return -(-size_bytes // unit) * unit


def play(seed: int, limit_bytes: int | None) -> int:
    """Random training steps: activations freed last in, first out, among gradients that stay.

    Gives the peak of the tensors' bytes, each rounded to what it takes.
    """
    draw = random.Random(seed)
    layers = [[int(MIB * 2 ** draw.uniform(-2, 4)) for _ in range(4)] for _ in range(5)]
    gradients = [int(MIB * 2 ** draw.uniform(-6, 2)) for _ in range(5)]
    _native.arena_reset_peak()
    live = peak = 0

    def empty(size_bytes: int) -> torch.Tensor:
        nonlocal live, peak
        live += rounded(size_bytes)
        peak = max(peak, live)
        return torch.empty(size_bytes, dtype=torch.uint8)

    for _ in range(3):
        saved: list[list[torch.Tensor]] = []
        kept: list[torch.Tensor] = []
        live = 0
        for index in range(30):
            work = empty(int(MIB * 2 ** draw.uniform(-3, 4)))
            saved.append([empty(size) for size in layers[index % 5]])
            live -= rounded(work.numel())
            del work
        while saved:
            kept.append(empty(gradients[len(saved) % 5]))
            live -= sum(rounded(tensor.numel()) for tensor in saved.pop())
        del kept
    if limit_bytes is not None:
        assert counters().peak_resident_bytes <= limit_bytes
        assert counters().over_limit_bytes == 0
    return peak


@pytest.mark.parametrize("seed", range(5))
def test_resident_memory_is_within_three_percent_and_some_mib_of_what_blocks_take(seed: int) -> None:
    with Limits(LARGE) as lease:
        _native.arena_trim()
        base_resident = counters().resident_bytes
        peak_bytes = play(seed, None)
        _native.arena_trim()
        limit_bytes = base_resident + int(1.03 * peak_bytes) + 4 * MIB
        lease.set_limit(limit_bytes)
        play(seed, limit_bytes)


def test_a_limit_purges_at_once_and_never_fails_an_allocation(lease: Limits) -> None:
    _native.arena_trim()
    base = counters().resident_bytes
    held = torch.ones(32 * MIB, dtype=torch.uint8)
    freed = torch.ones(64 * MIB, dtype=torch.uint8)
    del freed
    lease.set_limit(base + 40 * MIB)
    assert counters().resident_bytes <= base + 40 * MIB
    _native.arena_reset_peak()
    more = torch.ones(32 * MIB, dtype=torch.uint8)
    assert 20 * MIB <= counters().over_limit_bytes <= 32 * MIB
    assert held.sum(dtype=torch.int64).item() == more.sum(dtype=torch.int64).item() == 32 * MIB


def test_leases_add_up() -> None:
    with arena.activate(10 * MIB) as first:
        with arena.activate(20 * MIB) as second:
            assert counters().budget_bytes == 30 * MIB
            second.set_budget(5 * MIB)
            assert counters().budget_bytes == 15 * MIB
        assert counters().budget_bytes == 10 * MIB
        held = torch.empty(MIB)
        assert _native.arena_block(held.data_ptr()) is not None
        second.close()
        second.set_budget(MIB)
        assert counters().budget_bytes == 10 * MIB, "a closed lease counts no more"
        first.set_budget(20 * MIB)
        assert counters().budget_bytes == 20 * MIB
    outside = torch.empty(MIB)
    assert _native.arena_block(outside.data_ptr()) is None
    assert counters().budget_bytes is None


def test_blocks_outlive_the_lease() -> None:
    with Limits(LARGE):
        tensor = torch.arange(MIB)
    assert _native.arena_block(tensor.data_ptr()) is not None
    assert bool((tensor == torch.arange(MIB)).all())
    base = counters().in_use_bytes
    del tensor
    assert base - counters().in_use_bytes == 8 * MIB


def test_numpy_shares_the_memory(lease: Limits) -> None:
    tensor = torch.zeros(MIB)
    array = tensor.numpy()
    array[5] = 3
    assert tensor[5].item() == 3
    del tensor
    again = torch.from_numpy(array)
    assert again[5].item() == 3
    borrowed = torch.from_numpy(np.ones(MIB))
    assert _native.arena_block(borrowed.data_ptr()) is None
    grown = torch.empty(MIB)
    grown.resize_(2 * MIB)
    assert _native.arena_block(grown.data_ptr()) is not None
    grown.untyped_storage().resize_(0)


def test_training_gives_the_same_bits() -> None:
    def losses() -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 10))
        optimizer = torch.optim.AdamW(model.parameters())
        found = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(64, 256)).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    expected = losses()
    with Limits(0):
        assert losses() == expected


def test_a_forked_child_can_use_and_free_what_it_inherits() -> None:
    out = python("""
        import os, threading, torch
        from penstock import _native
        from penstock.runtime import arena
        torch.set_num_threads(1)
        assert arena.unavailable() is None
        lease = arena.activate(1 << 40)
        held = torch.ones(1 << 22)
        stop = threading.Event()
        def churn():
            while not stop.is_set():
                torch.empty(100_000)
        thread = threading.Thread(target=churn); thread.start()
        codes = []
        for _ in range(20):
            child = os.fork()
            if child == 0:
                ok = float(held.sum()) == 1 << 22
                del held
                more = torch.full((1 << 20,), 2.0)
                _native.arena_trim()
                os._exit(0 if ok and float(more.sum()) == 2 << 20 else 1)
            codes.append(os.waitpid(child, 0)[1])
        stop.set(); thread.join()
        print(set(codes), float(held.sum()))
    """)
    assert out.split() == ["{0}", str(float(1 << 22))]


def test_a_limit_on_data_is_respected_and_freed_memory_counts() -> None:
    out = python("""
        import resource, torch
        from penstock import _native
        from penstock.runtime import arena
        torch.set_num_threads(1)
        assert arena.unavailable() is None
        lease = arena.activate(1 << 40)
        torch.ones(1 << 20)
        with open("/proc/self/status") as file:
            fields = dict(line.split(":", 1) for line in file)
        data_bytes = int(fields["VmData"].split()[0]) * 1024
        limit = data_bytes + (256 << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        held = torch.ones(50 << 20, dtype=torch.uint8)
        hole = torch.ones(80 << 20, dtype=torch.uint8)
        wall = torch.ones(10 << 20, dtype=torch.uint8)
        try:
            torch.ones(400 << 20, dtype=torch.uint8)
        except RuntimeError as error:
            print("refused" if "allocate" in str(error) else error)
        del hole  # its memory must be given back before the next fits
        torch.ones(160 << 20, dtype=torch.uint8)
        print(bool((held == 1).all() and (wall == 1).all()))
        torch.ones(80 << 20, dtype=torch.uint8)
    """)
    assert out.split() == ["refused", "True"]


LIMITED = """
    import os, resource, torch
    from penstock import _native
    from penstock.runtime import arena

    def data_bytes():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))

    def limit_data(growth_bytes):
        limit = data_bytes() + growth_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))

    torch.set_num_threads(1)
    MIB = 1 << 20
    file = os.memfd_create("away")
    os.ftruncate(file, 64 * MIB)

    def leave(tensor):
        _native.arena_lent_back(_native.arena_lend(tensor.data_ptr(), guards=True))
        assert _native.arena_leave(tensor.data_ptr(), [(file, 0, 0, tensor.numel())])
"""


def test_only_memory_counts_as_data() -> None:
    out = python(
        LIMITED
        + """
    torch.empty(1)
    before = data_bytes()
    assert arena.unavailable() is None
    lease = arena.activate(1 << 40)
    print(data_bytes() - before < 4 * MIB)
    before = data_bytes()
    tensors = [torch.ones(size, dtype=torch.uint8) for size in range(MIB, 6 * MIB, 700_001)]
    for tensor in tensors * 3:
        leave(tensor)
        assert tensor[-1] == 0  # what the file holds
        torch.ones(3 * MIB + 5000, dtype=torch.uint8)
        print(data_bytes() - before < _native.arena_stats().resident_bytes + 4 * MIB)
    """
    )
    assert set(out.split()) == {"True"}


def test_what_the_system_refuses_is_an_error() -> None:
    out = python(
        LIMITED
        + """
    assert arena.unavailable() is None
    lease = arena.activate(1 << 40)
    held = torch.ones(20 * MIB, dtype=torch.uint8)
    limit_data(16 * MIB)
    kept = []
    try:
        while True:
            kept.append(torch.ones(MIB + 5000, dtype=torch.uint8))
    except RuntimeError as error:
        print("allocate memory" in str(error))
    stats = _native.arena_stats()
    print(stats.system_refused_bytes == MIB + 5000, stats.refused_bytes == 0)
    print(8 <= len(kept) <= 16, all(tensor.min() == tensor.max() == 1 for tensor in [held, *kept]))
    kept.clear()
    print(bool(torch.ones(12 * MIB, dtype=torch.uint8).min() == 1))
    """
    )
    assert out.split() == ["True"] * 6


def test_an_access_that_the_system_refuses_says_why() -> None:
    script = (
        LIMITED
        + """
    assert arena.unavailable() is None
    lease = arena.activate(1 << 40)
    tensor = torch.ones(20 * MIB, dtype=torch.uint8)
    leave(tensor)
    _native.arena_trim()
    limit_data(8 * MIB)
    tensor[0].item()
    """
    )
    ended = apart.python(script)
    assert ended.returncode == -signal.SIGSEGV
    assert f"penstock: there is no memory for {20 * MIB} bytes at 0x" in ended.stderr


def test_limited_addresses_leave_the_program_its_own() -> None:
    out = python("""
        import resource, torch
        from penstock import _native
        from penstock.runtime import arena
        limit = 16 << 30
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        print(arena.unavailable())
        assert arena.unavailable() is None
        lease = arena.activate(1 << 40)
        tensor = torch.ones(1 << 28, dtype=torch.uint8)
        print(_native.arena_block(tensor.data_ptr()) is not None)
    """)
    assert out.split() == ["None", "True"]


def test_it_can_be_switched_off_and_says_so() -> None:
    out = python(
        """
        from penstock import _native
        from penstock.runtime import arena
        print(arena.unavailable())
        print(arena.unavailable())
        """,
        PENSTOCK_ARENA="0",
    )
    assert out.splitlines() == ["PENSTOCK_ARENA=0 is set"] * 2


def test_a_library_that_does_not_allocate_is_refused() -> None:
    out = python("""
        import torch
        from penstock import _native
        print(_native.arena_install("/libnowhere.so"), _native.arena_install("/libc.so.6"))
        print(_native.arena_install("/libc10.so"), _native.arena_install("/libc10.so"))
        _native.arena_activate(1 << 30)
        print(torch.ones(1 << 20).data_ptr() % 4096)
    """)
    assert out.split() == ["False", "False", "True", "True", "0"]


def test_counters_are_cheap(lease: Limits) -> None:
    import timeit

    from penstock import _native

    rounds = 20_000
    assert min(timeit.repeat(_native.arena_stats, number=rounds, repeat=3)) / rounds < 5e-6
    assert min(timeit.repeat(_native.arena_reset_peak, number=rounds, repeat=3)) / rounds < 5e-6
