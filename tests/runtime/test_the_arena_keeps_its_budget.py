"""The budget in the allocator itself: what it takes out, what it refuses, and who may ask."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import _native
from penstock.runtime import arena
from tests.runtime.paging import Away, Limits, random_bytes, tensor_of, unnamed_file
from tests.support import apart

if arena.unavailable() is not None:
    pytest.skip(f"no paging here: {arena.unavailable()}", allow_module_level=True)

MIB = 1 << 20
LARGE = 1 << 40


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[int]:
    file = unnamed_file(tmp_path)
    _native.arena_swap_file(-1, file, 1 << 30)
    yield file
    _native.arena_swap_file(-1, -1, 0)
    os.close(file)


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own, after what all of these need."""
    start = """
        import ctypes, faulthandler, os, sys, tempfile
        import numpy as np, torch
        from penstock import _native
        from penstock.runtime import arena
        from tests.runtime.paging import Away, Limits, random_bytes, tensor_of, unnamed_file
        MIB = 1 << 20
        torch.set_num_threads(1)
        assert arena.unavailable() is None
        file = unnamed_file(tempfile.gettempdir())
        away = Away(file)
    """
    return apart.python(textwrap.dedent(start) + textwrap.dedent(code))


def test_least_recently_used_tensors_leave_first_and_come_back_when_touched(swap: int) -> None:
    with Limits(LARGE, 24 * MIB) as lease:
        tensors = []
        for i in range(6):
            _native.arena_touch([])
            tensors.append(torch.full((4 * MIB,), i, dtype=torch.uint8))
        addresses = [tensor.data_ptr() for tensor in tensors]
        _native.arena_touch([addresses[0]])
        _native.arena_touch([])
        _native.arena_events()
        more = torch.full((7 * MIB,), 9, dtype=torch.uint8)
        assert [_native.arena_state(address) for address in addresses] == ["in", "out", "out", *["in"] * 3]
        assert _native.arena_touch([]) == 2
        assert _native.arena_events() == [(addresses[1], "out"), (addresses[2], "out")]
        assert _native.arena_stats().swap_used_bytes == 8 * MIB
        assert _native.arena_touch(addresses[1:3]) > 0
        assert [_native.arena_state(address) for address in addresses[1:3]] == ["guarded"] * 2
        faults = _native.arena_stats().faults
        assert all(bool((tensors[i] == i).all()) for i in (1, 2))
        assert _native.arena_stats().faults == faults
        stats = _native.arena_stats()
        assert stats.peak_in_memory_bytes <= lease.budget_bytes
        assert stats.over_budget_bytes == 0
        lease.set_budget(None)
        assert all(bool((tensor.numpy() == i).all()) for i, tensor in enumerate(tensors))
        assert bool((more == 9).all())
        del tensors, more
    assert _native.arena_stats().swap_used_bytes == 0


def test_tensors_with_a_copy_are_dropped_before_any_is_written(swap: int, tmp_path: Path) -> None:
    with Limits(LARGE, 12 * MIB):
        away = Away(unnamed_file(tmp_path))
        old, copied = torch.ones(4 * MIB, dtype=torch.uint8), torch.ones(4 * MIB, dtype=torch.uint8)
        assert away.leave(copied)
        assert int(copied[0]) == 1
        _native.arena_touch([])
        written = _native.arena_stats().swapped_out_bytes
        new = torch.ones(6 * MIB, dtype=torch.uint8)
        assert _native.arena_state(copied.data_ptr()) == "out"
        assert _native.arena_state(old.data_ptr()) == "in"
        assert _native.arena_stats().swapped_out_bytes == written
        del new
        os.close(away.file)


def test_what_cannot_fit_is_refused_with_its_size(swap: int) -> None:
    with Limits(LARGE, 8 * MIB):
        held = torch.ones(5 * MIB, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="allocate"):
            torch.ones(5 * MIB, dtype=torch.uint8)  # the other one is pinned
        assert _native.arena_stats().refused_bytes == 5 * MIB
        assert _native.arena_stats().refused_at_bytes > _native.arena_stats().budget_bytes
        _native.arena_touch([])
        with pytest.raises(RuntimeError, match="allocate"):
            torch.ones(9 * MIB, dtype=torch.uint8)
        assert _native.arena_stats().refused_bytes == 9 * MIB
        assert _native.arena_state(held.data_ptr()) == "in"
        other = torch.ones(5 * MIB, dtype=torch.uint8)
        assert _native.arena_stage(held.data_ptr()) == 0, "no room beside what is pinned"
        with pytest.raises(OSError) as refused:
            _native.arena_bring_in(held.data_ptr())
        assert refused.value.errno == errno.ENOMEM
        assert _native.arena_state(held.data_ptr()) == "out"
        assert not _native.arena_swap_file(-1, -1, 0), "it holds a block"
        del other
        assert int(held.numpy().sum(dtype=np.int64)) == 5 * MIB
        del held


def test_a_full_swap_file_refuses_and_loses_nothing(tmp_path: Path) -> None:
    file = unnamed_file(tmp_path)
    _native.arena_swap_file(-1, file, 3 * MIB)
    with Limits(LARGE, 8 * MIB):
        tensors = [torch.full((2 * MIB,), i, dtype=torch.uint8) for i in range(4)]
        _native.arena_touch([])
        tensors.append(torch.full((2 * MIB,), 4, dtype=torch.uint8))
        _native.arena_touch([])
        with pytest.raises(RuntimeError):
            torch.empty(2 * MIB, dtype=torch.uint8)
        assert _native.arena_stats().over_budget_bytes == 0
    assert all(bool((tensor.numpy() == i).all()) for i, tensor in enumerate(tensors))
    del tensors
    _native.arena_swap_file(-1, -1, 0)
    os.close(file)


def test_physical_memory_is_kept_below_the_limit_too(swap: int) -> None:
    _native.arena_trim()
    resident = _native.arena_stats().resident_bytes
    with Limits(resident + 32 * MIB, 64 * MIB):
        tensors = []
        for i in range(20):
            _native.arena_touch([])
            tensors.append(torch.full((3 * MIB,), i, dtype=torch.uint8))  # each takes 4 MiB
        assert _native.arena_stats().over_limit_bytes == 0
    assert all(bool((tensor.numpy() == i).all()) for i, tensor in enumerate(tensors))
    del tensors


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    budget_bytes=st.integers(6 * MIB, 20 * MIB),
    limited=st.booleans(),
    steps=st.integers(10, 60),
)
def test_random_programs_keep_the_budget_and_every_byte(
    swap: int, tmp_path: Path, seed: int, budget_bytes: int, limited: bool, steps: int
) -> None:
    draw = random.Random(seed)
    away = Away(unnamed_file(tmp_path))
    held: list[tuple[torch.Tensor, np.ndarray]] = []
    segments: dict[int, tuple[int, int, int, int]] = {}
    _native.arena_trim()
    limit = _native.arena_stats().resident_bytes + 2 * budget_bytes if limited else LARGE
    with Limits(limit, budget_bytes) as lease:
        for step in range(steps):
            action = draw.randrange(6)
            if action < 2 or not held:
                _native.arena_touch([])
                content = random_bytes(int(2 ** draw.uniform(12, 22)), step)
                held.append((tensor_of(content), content))
                continue
            tensor, content = held[draw.randrange(len(held))]
            address = tensor.data_ptr()
            if _native.arena_state(address) == "out" and address in segments and action == 2:
                if staging := _native.arena_stage(address):
                    _native.arena_unstage(staging)
                    away.come_back(tensor, segments[address])
                continue
            _native.arena_touch([address])
            _native.arena_bring_in(address)
            if action == 3:
                held = [pair for pair in held if pair[0] is not tensor]
                del tensor
                segments.pop(address, None)
            elif action == 4:
                _native.arena_unguard(address)
                content[:] = random_bytes(content.size, step)
                tensor.numpy()[:] = content
                segments.pop(address, None)
            elif action == 5:
                segments[address] = away.write(tensor)
                assert _native.arena_leave(address, [segments[address]])
            else:
                assert np.array_equal(tensor.numpy(), content)
            stats = _native.arena_stats()
            assert stats.peak_in_memory_bytes <= budget_bytes
            assert stats.over_budget_bytes == 0
        lease.set_budget(None)
        for tensor, content in held:
            assert np.array_equal(tensor.numpy(), content)
        held.clear()
        tensor = None  # type: ignore[assignment]
    os.close(away.file)


def test_a_fault_takes_what_is_pinned_only_where_nothing_else_can_leave(swap: int) -> None:
    with Limits(LARGE, 12 * MIB):
        tensors = []
        for i in range(6):
            _native.arena_touch([])
            tensors.append(torch.full((4 * MIB,), i, dtype=torch.uint8))
        _native.arena_touch([])
        _native.arena_reset_peak()
        assert int(tensors[0].numpy()[5]) == 0
        assert _native.arena_stats().over_budget_bytes == 0
        states = [_native.arena_state(tensor.data_ptr()) for tensor in tensors]
        _native.arena_touch(
            [tensor.data_ptr() for tensor, state in zip(tensors, states, strict=True) if state != "out"]
        )
        first, second = [i for i, state in enumerate(states) if state == "out"][:2]
        assert int(tensors[first].numpy()[5]) == first
        pinned = [tensor for tensor, state in zip(tensors, states, strict=True) if state != "out"]
        assert [_native.arena_state(tensor.data_ptr()) for tensor in pinned].count("out") == 1
        assert int(tensors[second].numpy()[5]) == second  # the first one leaves for it
        assert [_native.arena_state(tensor.data_ptr()) for tensor in pinned].count("out") == 1
        assert _native.arena_stats().over_budget_bytes == 0
        _native.arena_kernel_over()
        del tensors, pinned


@pytest.mark.parametrize("size_bytes", [70_000, 2 * MIB])
def test_blocks_read_by_numpy_in_quick_succession_keep_the_budget(swap: int, size_bytes: int) -> None:
    with Limits(LARGE, 2 * size_bytes) as lease:
        tensors = []
        for i in range(12):
            _native.arena_touch([])
            tensors.append(torch.full((size_bytes,), i, dtype=torch.uint8))
        _native.arena_touch([])
        for _ in range(8):
            for i, tensor in enumerate(tensors):
                assert bool((tensor.numpy() == i).all())
        stats = _native.arena_stats()
        assert stats.peak_in_memory_bytes <= lease.budget_bytes
        assert stats.over_budget_bytes == 0
        del tensors, tensor


def test_a_copy_between_blocks_that_do_not_fit_together_ends_and_is_counted(swap: int) -> None:
    source_bytes = random_bytes(3 * MIB)
    with Limits(LARGE, 4 * MIB):
        source = tensor_of(source_bytes)
        _native.arena_touch([])
        target = torch.zeros(3 * MIB, dtype=torch.uint8)
        _native.arena_touch([])
        _native.arena_reset_peak()
        np.copyto(target.numpy(), source.numpy())
        assert 0 < _native.arena_stats().over_budget_bytes <= 2 * MIB
        assert np.array_equal(target.numpy(), source_bytes)
        del source, target


def test_a_process_that_gets_no_thread_cannot_use_the_arena_and_says_why() -> None:
    result = python("""
        import resource
        mapped = int(open("/proc/self/statm").read().split()[0]) * 4096
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (200 << 10), before[1]))
        try:
            _native.arena_activate(1 << 40)
        except RuntimeError as error:
            print(error)
        print(_native.arena_paging_unavailable())
        resource.setrlimit(resource.RLIMIT_AS, before)
        lease = Limits(1 << 40)
        print(_native.arena_paging_unavailable())
    """)
    said = result.stdout.splitlines()
    assert len(said) == 3, result.stderr
    assert said[0] == said[1] and "SIGSEGV handler" in said[0]
    assert said[2] == "None"


def test_a_forked_child_reads_what_is_out_and_moves_nothing() -> None:
    result = python("""
        lease = Limits(1 << 40)
        tensors = [tensor_of(random_bytes(size)) for size in (5000, 3 * MIB + 7)]
        for tensor in tensors:
            assert away.leave(tensor)
        child = os.fork()
        if child == 0:
            right = all(np.array_equal(t.numpy(), random_bytes(t.numel())) for t in tensors)
            tensors[1].numpy()[0] ^= 1
            right = right and not away.leave(tensors[1])
            grandchild = os.fork()
            os._exit(0 if right and (grandchild == 0 or os.waitpid(grandchild, 0)[1] == 0) else 1)
        print(os.waitpid(child, 0)[1], [_native.arena_state(t.data_ptr()) for t in tensors])
        print(all(np.array_equal(t.numpy(), random_bytes(t.numel())) for t in tensors))
    """)
    assert result.stdout.splitlines() == ["0 ['out', 'out']", "True"], result.stderr


# What the system has: {handler, flags, restorer, mask}, by its own call, which nobody can see.
SYSTEM = """
        import platform, signal
        libc = ctypes.CDLL(None)
        number = {"x86_64": 13, "aarch64": 134}[platform.machine()]
        def system(action=None):
            before = (ctypes.c_ulong * 4)()
            assert libc.syscall(number, int(signal.SIGSEGV), action, before, 8) == 0
            return before
"""


SETS = """
        faulthandler.enable()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        signal.signal(signal.SIGSEGV, lambda *_: None)
        libc.signal(signal.SIGSEGV, None)
        libc.sigaction(signal.SIGSEGV, (ctypes.c_char * 256)(), None)
        libc.__sysv_signal(signal.SIGSEGV, None)
"""


def test_whoever_sets_a_handler_of_sigsegv_comes_behind_the_arena() -> None:
    result = python(
        SYSTEM
        + f"""
        def behind(sets):
            lease = arena.ArenaLease(1 << 40)
            served = system()[0]
            tensor = tensor_of(random_bytes(3 * MIB))
            assert away.leave(tensor)
            exec(sets)
            assert system()[0] == served
            assert np.array_equal(tensor.numpy(), random_bytes(3 * MIB))
            tensor.numpy()[0] ^= 1
            asked = (ctypes.c_ulong * 32)()
            libc.sigaction(signal.SIGSEGV, None, asked)
            lease.close()
            assert system()[0] == asked[0] != served
            with arena.ArenaLease(1 << 40):
                assert system()[0] == served and not _native.arena_own_faults()
                assert away.leave(tensor)
                assert system((ctypes.c_ulong * 4)())[0] == served  # nobody has seen this
                assert _native.arena_own_faults() and system()[0] == served
                tensor.numpy()[0] ^= 1
            assert np.array_equal(tensor.numpy(), random_bytes(3 * MIB)) and system()[0] == 0

        for sets in {SETS.strip().splitlines()}:
            behind(sets.strip())
            faulthandler.disable()
            libc.signal(signal.SIGSEGV, None)
            print("right")
    """
    )
    assert result.stdout.split() == ["right"] * len(SETS.strip().splitlines()), result.stderr


@pytest.mark.parametrize("when", ["before", "after"])
def test_faulthandler_and_the_arena_get_along(when: str) -> None:
    result = python(f"""
        if {when == "before"}:
            faulthandler.enable()
        lease = Limits(1 << 40)
        tensor = tensor_of(random_bytes(3 * MIB))
        assert away.leave(tensor)
        if {when == "after"}:
            faulthandler.enable()
        print(np.array_equal(tensor.numpy(), random_bytes(3 * MIB)), flush=True)
        ctypes.string_at(0)
    """)
    assert result.stdout.split() == ["True"]
    assert result.returncode == -11
    assert "Segmentation fault" in result.stderr and "string_at" in result.stderr


@pytest.mark.parametrize("mask", ["kept", "lost"])
def test_handlers_that_are_not_python_s_are_called_as_the_system_would(mask: str) -> None:
    """With what they block, once where they say so, and as often as they jump away."""
    result = python(
        SYSTEM
        + f"""
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        lease = Limits(1 << 40)
        seen = []
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(
            lambda number: seen.append(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
        )
        action = (ctypes.c_ulong * 32)()
        action[0] = ctypes.cast(handler, ctypes.c_void_p).value
        action[1] = 1 << (signal.SIGUSR1 - 1)
        ctypes.cast(action, ctypes.POINTER(ctypes.c_int))[34] = {-(1 << 31) if mask == "lost" else 0}
        libc.sigaction(signal.SIGSEGV, action, None)
        signal.raise_signal(signal.SIGSEGV)
        after = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        print([int(number) for number in seen[0]], len(after), flush=True)
        signal.raise_signal(signal.SIGSEGV)
        print(len(seen), flush=True)
    """
    )
    lines = result.stdout.splitlines()
    assert lines[0] == "[10, 11] 0", result.stderr
    assert (lines[1:], result.returncode) == (([], -11) if mask == "lost" else (["2"], 0))


def test_a_wild_access_still_ends_the_process() -> None:
    result = python("""
        lease = Limits(1 << 40)
        tensor = torch.zeros(MIB)
        ctypes.string_at(8)
    """)
    assert result.returncode == -11


def test_bytes_that_cannot_be_read_end_the_process_with_a_clear_line() -> None:
    result = python("""
        lease = Limits(1 << 40)
        tensor = tensor_of(random_bytes(3 * MIB))
        assert away.leave(tensor)
        os.ftruncate(file, MIB)
        try:
            _native.arena_bring_in(tensor.data_ptr())
        except OSError as error:
            print(error.errno, _native.arena_state(tensor.data_ptr()), flush=True)
        tensor.numpy()[0]
    """)
    assert result.stdout.split() == [str(errno.EIO), "out"]
    assert result.returncode == -11
    assert "penstock: 3145728 bytes at" in result.stderr and "Input/output error" in result.stderr
