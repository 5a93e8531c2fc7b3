"""Rows of libraries that move bytes of memory: pip install deepspeed nixl.

DeepSpeed's async_io and NIXL's POSIX plugin leave settings to their users. Each is tried with several
for every size, as its own documentation advises, and measured with the fastest, which may differ for
writes and reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from io_bench.formats import Unavailable, quiet, require
from io_bench.measure import timed
from io_bench.rows import IN_FLIGHT, KINDS, Place, Row

MIB = 1 << 20
Setting = TypeVar("Setting")


class Mover(Protocol):
    """Writes and reads tensors of the place with one setting."""

    def write(self, indices: Iterable[int]) -> None:
        """These tensors at once; wait for all."""

    def read(self, indices: Iterable[int]) -> None: ...


class Tuned(Row):
    """Overwrites the file of the place past the page cache, with the fastest of several settings."""

    kinds = (*KINDS, *IN_FLIGHT)
    bypasses = True

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.descriptor = os.open(place.file, os.O_RDWR | os.O_DIRECT)
        self.offsets = [sum(self.tensors.sizes_bytes[:index]) for index in range(len(self.tensors.tensors))]
        self.indices = range(len(self.tensors.tensors))
        self.writer: Mover
        self.reader: Mover

    def choose(self, make: Callable[[Setting], Mover], settings: Iterable[Setting]) -> None:
        """Keep the movers that write and read fastest, one tensor at a time."""
        movers = {str(setting): make(setting) for setting in settings}
        with quiet():
            writer = min(movers, key=lambda setting: self._least_s(movers[setting].write))
            reader = min(movers, key=lambda setting: self._least_s(movers[setting].read))
        self.writer, self.reader = movers[writer], movers[reader]
        self._settings = {"write": writer, "read": reader}

    def write(self, durable: bool) -> None:
        for index in self.indices:
            self.writer.write([index])
            if durable:
                os.fdatasync(self.descriptor)

    def read(self) -> list[Tensor]:
        for index in self.indices:
            self.reader.read([index])
        return self.tensors.destinations

    def settings(self) -> dict[str, Any]:
        return self._settings

    def write_in_flight(self) -> None:
        self.writer.write(self.indices)

    def read_in_flight(self) -> list[Tensor]:
        self.reader.read(self.indices)
        return self.tensors.destinations

    def close(self) -> None:
        os.close(self.descriptor)

    def _least_s(self, move: Callable[[Iterable[int]], None]) -> float:
        def one_after_another() -> None:
            for index in self.indices[:16]:
                move([index])

        return min(timed(one_after_another)[0].wall_s for _ in range(3))


class DeepSpeed(Tuned):
    name = "DeepSpeed aio"
    does = (
        "the async_io operator on page-locked memory of its own (other memory it copies), tuned among "
        "settings of its ds_nvme_tune; overwrites a preallocated file past the page cache"
    )
    # block bytes, queue depth, threads; requests submitted together, and events overlapped
    SETTINGS = ((MIB, 32, 1), (MIB, 128, 2), (8 * MIB, 32, 1), (8 * MIB, 128, 2), (MIB, 32, 4))

    def __init__(self, place: Place) -> None:
        require("deepspeed")
        with quiet():
            try:
                from deepspeed.ops.op_builder import AsyncIOBuilder

                library = AsyncIOBuilder().load(verbose=False)
            except Exception as error:  # whatever its build meets
                raise Unavailable(f"async_io cannot be built: {error}") from error
        super().__init__(place)
        self._library = library
        self._allocator = library.aio_handle(MIB, 32, False, True, 1)
        locked = [self._locked() for _ in range(2)]
        self._buffers = locked
        self._source, self._destination = (list(self._cut(buffer)) for buffer in locked)
        self.choose(self._mover, self.SETTINGS)

    def begin(self) -> None:
        for tensor, copy in zip(self.tensors.tensors, self._source, strict=True):
            copy.copy_(tensor)

    def scrub(self) -> None:
        self._buffers[1].zero_()

    def read(self) -> list[Tensor]:
        super().read()
        return self._destination

    def read_in_flight(self) -> list[Tensor]:
        super().read_in_flight()
        return self._destination

    def close(self) -> None:
        super().close()
        del self._source, self._destination
        while self._buffers:
            self._allocator.free_cpu_locked_tensor(self._buffers.pop())

    def _locked(self) -> Tensor:
        return self._allocator.new_cpu_locked_tensor(
            self.tensors.total_bytes // 4, torch.empty(0, dtype=torch.float32)
        )

    def _cut(self, buffer: Tensor) -> Iterable[Tensor]:
        return buffer.split([size_bytes // 4 for size_bytes in self.tensors.sizes_bytes])

    def _mover(self, setting: tuple[int, int, int]) -> Mover:
        block_bytes, depth, threads = setting
        handle = self._library.aio_handle(block_bytes, depth, False, True, threads)
        row, path = self, str(self.place.file)

        class Aio:
            def write(self, indices: Iterable[int]) -> None:
                for index in indices:
                    handle.async_pwrite(row._source[index], path, row.offsets[index])
                handle.wait()

            def read(self, indices: Iterable[int]) -> None:
                for index in indices:
                    handle.async_pread(row._destination[index], path, row.offsets[index])
                handle.wait()

        return Aio()


class Nixl(Tuned):
    name = "NIXL POSIX"
    does = (
        "memory and file registered beforehand, its io_uring and Linux-AIO queues and piece sizes tuned; "
        "polls for completion, which takes a core; overwrites a preallocated file past the page cache"
    )
    SETTINGS = tuple(
        (queue, piece_bytes) for queue in ("use_uring", "use_aio") for piece_bytes in (MIB, 4 * MIB, None)
    )

    def __init__(self, place: Place) -> None:
        require("nixl")
        with quiet():
            try:
                from nixl import _api as library
            except ImportError as error:
                raise Unavailable(str(error)) from error
        super().__init__(place)
        self._library = library
        self._agents: dict[str, Any] = {}
        self._registered: list[tuple[Any, Any]] = []
        self.choose(self._mover, self.SETTINGS)

    def close(self) -> None:
        for agent, registered in self._registered:
            agent.deregister_memory(registered)
        super().close()

    def _agent(self, queue: str) -> Any:
        if queue not in self._agents:
            with quiet():
                config = self._library.nixl_agent_config(enable_prog_thread=False, backends=[])
                agent = self._library.nixl_agent(queue, config)
                agent.create_backend("POSIX", {queue: "true"})
            total_bytes = self.tensors.total_bytes
            for buffer in (self.tensors.source, self.tensors.destination):
                memory = [(buffer.address, total_bytes, 0, "")]
                self._registered.append((agent, agent.register_memory(memory, "DRAM", backends=["POSIX"])))
            file = [(0, total_bytes, self.descriptor, "")]
            self._registered.append((agent, agent.register_memory(file, "FILE", backends=["POSIX"])))
            self._agents[queue] = agent
        return self._agents[queue]

    def _mover(self, setting: tuple[str, int | None]) -> Mover:
        queue, piece_bytes = setting
        agent, row = self._agent(queue), self

        def move(kind: str, tensors: list[Tensor], indices: Iterable[int]) -> None:
            memory, file = [], []
            for index in indices:
                address, offset = tensors[index].data_ptr(), row.offsets[index]
                size_bytes = tensors[index].nbytes
                step = piece_bytes or size_bytes
                for begin in range(0, size_bytes, step):
                    length = min(step, size_bytes - begin)
                    memory.append((address + begin, length, 0))
                    file.append((offset + begin, length, row.descriptor))
            handle = agent.initialize_xfer(
                kind,
                agent.get_xfer_descs(memory, "DRAM"),
                agent.get_xfer_descs(file, "FILE"),
                queue,
                backends=["POSIX"],
            )
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
            if state != "DONE":
                raise RuntimeError(f"a transfer of NIXL ended with {state}")

        class Posix:
            def write(self, indices: Iterable[int]) -> None:
                move("WRITE", row.tensors.tensors, indices)

            def read(self, indices: Iterable[int]) -> None:
                move("READ", row.tensors.destinations, indices)

        return Posix()


PEERS: dict[str, type[Row]] = {row.name: row for row in (DeepSpeed, Nixl)}
