import enum
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, overload

import numpy as np
import numpy.typing as npt

from penstock.storage.transfer import Transfer

class ArenaStats:
    """Counters of the arena. "In memory" counts bytes as they were requested, of blocks and staging areas."""

    @property
    def in_use_bytes(self) -> int: ...  # requested, of all blocks alive, in memory or out
    @property
    def peak_in_use_bytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...  # physical: chunks that have memory
    @property
    def peak_resident_bytes(self) -> int: ...
    @property
    def limit_bytes(self) -> int: ...
    @property
    def serial(self) -> int: ...
    @property
    def purged_bytes(self) -> int: ...
    @property
    def over_limit_bytes(self) -> int: ...
    @property
    def budget_bytes(self) -> int | None: ...  # None: no budget
    @property
    def in_memory_bytes(self) -> int: ...  # requested, of the blocks in memory and of staging areas
    @property
    def foreign_bytes(self) -> int: ...  # requested, of blocks in memory beside budget and limit
    @property
    def peak_in_memory_bytes(self) -> int: ...  # since arena_reset_peak, exact
    @property
    def out_bytes(self) -> int: ...  # requested, of the blocks that are out
    @property
    def swap_used_bytes(self) -> int: ...  # of the native swap file
    @property
    def faults(self) -> int: ...  # unplanned accesses served, reads and writes
    @property
    def swapped_out_bytes(self) -> int: ...  # written by the native side to its swap file
    @property
    def swapped_in_bytes(self) -> int: ...  # read by the native side: faults, arena_touch, arena_bring_in
    @property
    def refused_bytes(self) -> int: ...  # size of the last allocation that the budget refused, 0: none was
    @property
    def refused_at_bytes(self) -> int: ...  # the budget that it would have taken
    @property
    def system_refused_bytes(self) -> int: ...  # of the last one that fitted, but the system refused
    @property
    def over_budget_bytes(self) -> int: ...  # by which peak_in_memory_bytes exceeded the budget

def arena_install(library_suffix: str, through_torch: bool = False) -> bool: ...

# Why bytes cannot leave and come back on this system; None where they can.
def arena_paging_unavailable() -> str | None: ...

# limit_bytes bounds physical memory (softly); budget_bytes bounds in_memory_bytes (None: nothing does).
def arena_activate(limit_bytes: int, budget_bytes: int | None = None) -> None: ...
def arena_deactivate() -> None: ...
def arena_set_limit(limit_bytes: int, budget_bytes: int | None = None) -> None: ...
def arena_disown_all() -> None: ...  # what is in memory now is beside budget and limit
def arena_own_all() -> None: ...
def arena_own(address: int) -> bool: ...  # it counts from now on
def arena_trim() -> None: ...
def arena_reset_peak() -> None: ...
def arena_stats() -> ArenaStats: ...
def arena_block(address: int) -> tuple[int, int, int] | None: ...

# Where the native side writes what it evicts. fd_direct may be -1; fd_buffered of -1 takes the file away.
# False, and nothing changes, while bytes are in the present one, or on their way. The arena does not own
# the descriptors. fd_buffered may be the handle of a namespace: capacity_bytes of it, from `begin` on.
def arena_swap_file(fd_direct: int, fd_buffered: int, capacity_bytes: int, begin: int = 0) -> bool: ...

# `address` is the start of a block from here on. ValueError where no block starts there.
# A kernel begins that uses these blocks. Gives the number of events pending.
def arena_touch(addresses: list[int]) -> int: ...
def arena_kernel_over() -> None: ...

# What a kernel uses stays after it. writable: and the system may write to it, from now on.
def arena_hold(address: int, change: int, writable: bool = False) -> bool: ...

# And no copy is kept. OSError with EBUSY: others let blocks leave as fast.
def arena_bring_in_all() -> None: ...
def arena_unguard(address: int) -> None: ...
def arena_written(address: int) -> bool: ...

# Somebody reads the block at its address until arena_lent_back: so long it stays readable, even if it is
# released. That gives True if it was neither written, nor away, nor released meanwhile: what was read is what
# it held. guards: from then on writes are noticed, and no copy is kept; 0: it is out, and there is nothing to
# copy.
def arena_lend(address: int, guards: bool = False) -> int: ...
def arena_lent_back(loan: int) -> bool: ...

# segments: (file descriptor, offset in the file, offset in the block, size in bytes).

# packing: of the copy; packed bytes are at the end of the block's pages.
def arena_leave(address: int, segments: list[tuple[int, int, int, int]], packing: Packing = ...) -> bool: ...

class ArenaPacked:
    """A packed copy of a block, in memory that counts: whole pages, at whose end it lies."""

    @property
    def address(self) -> int: ...  # 0: the arena has given the memory up, and has the bytes elsewhere
    @property
    def packing(self) -> Packing: ...

# Of a guarded block in memory. None where that saves no page, or there is no room for it.
def arena_pack(address: int, codec: Codec, itemsize: int) -> ArenaPacked | None: ...

# The block leaves for its packed copy. False: it was written since it was guarded.
def arena_leave_packed(address: int, packed: ArenaPacked) -> bool: ...

# The packed copy is in files too, and without `keeps` only there. False: the block holds something else now.
def arena_packed_written(
    address: int, packed: ArenaPacked, segments: list[tuple[int, int, int, int]], keeps: bool
) -> bool: ...
def arena_drop_packed(address: int) -> bool: ...  # False: it is in no file, or not in memory

# A place to read the block's copy to, until one of the next three, even if the block is released; 0: there is
# no room. packed: for the packed bytes of its copy as they are.
def arena_stage(address: int, packed: bool = False) -> int: ...

# guard: its copy stays valid, and a write to it is noticed. False: what was read is not what the block holds
# now; it is out, or released. Where it was staged packed, it stays out in any case.
def arena_arrive(staging: int, guard: bool = True) -> bool | None: ...
def arena_unstage(staging: int) -> None: ...
def arena_abandon(staging: int) -> None: ...  # who reads to it may do so for ever: nobody else gets it
def arena_bring_in(address: int) -> None: ...
def arena_state(address: int) -> Literal["in", "guarded", "out", "staged", "dropped"]: ...
def arena_drop(address: int) -> bool: ...  # False if it is out
def arena_take(address: int, source: int) -> bool: ...  # a dropped block gets the memory of another
def arena_keep_for(address: int, change: int) -> None: ...  # recipes that hold while it is not written
def arena_compute_dropped(computes: bool) -> None: ...  # whether somebody asks for questions

# Number, address, whether it is a write, and the thread that asks, as threading.get_ident names it.
def arena_wait_for_fault(seconds: float) -> tuple[int, int, bool, int] | None: ...
def arena_end_fault(number: int, done: bool) -> None: ...
def arena_forget_copy(address: int) -> None: ...
def arena_make_room(size_bytes: int, pinned: Sequence[int]) -> bool: ...
def arena_events() -> list[tuple[int, Literal["out", "in"]]]: ...
def arena_in_memory_bytes() -> int: ...  # of arena_stats(), without waiting for a lock
def arena_own_faults() -> bool: ...  # True if another handler had taken our place
def arena_leave_faults() -> None: ...  # the process has its handler back, if all is in memory and writable
def arena_set_fault_timeout(seconds: float) -> None: ...  # 120 unless told
def crc32c(data: bytes | bytearray | memoryview, crc: int = 0) -> int: ...
def crc32c_at(address: int, size_bytes: int, crc: int = 0) -> int: ...
def copy_crc32c(destination: int, source: int, size_bytes: int, crc: int = 0) -> int: ...
def crc32c_combine(first: int, second: int, second_bytes: int) -> int: ...
def bitmask_head_bytes(elements: int) -> int: ...
def bitmask_count_kept(data: int, elements: int, itemsize: int) -> int: ...
def bitmask_encode(
    data: int, elements: int, itemsize: int, packed: int, capacity_bytes: int
) -> int | None: ...  # bytes written; None: it does not fit
def bitmask_decode(packed: int, packed_bytes: int, data: int, elements: int, itemsize: int) -> bool: ...

class Codec(enum.Enum):
    csr = 0
    fp16 = 1
    bf16 = 2

class Packing:
    """So many elements in so many packed bytes; 0: they are not packed."""

    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(self, codec: Codec, packed_bytes: int, elements: int, itemsize: int) -> None: ...
    @property
    def packed_bytes(self) -> int: ...
    @property
    def codec(self) -> Codec: ...

def pack(packing: Packing, data: int, packed: int) -> bool: ...
def unpack(packing: Packing, packed: int, data: int) -> bool: ...

# The packed bytes are the last ones of the data.
def unpack_in_place(packing: Packing, data: int, capacity_bytes: int) -> bool: ...

DEMAND: int
PREFETCH: int
EVICT: int

class Transfers:
    def __init__(
        self,
        kind: str,
        methods: Sequence[str],
        depth: int,
        piece_bytes: int,
        slot_bytes: int,
        slots: int,
        threads: int,
    ) -> None: ...
    def submit(self, transfers: Sequence[Transfer], /) -> None: ...
    def cancel(self, transfers: Sequence[Transfer], /) -> int: ...
    def raise_priority(self, transfers: Sequence[Transfer], /) -> None: ...
    def deliver_the_rest(self) -> None: ...
    def close(self, timeout_s: float) -> bool: ...

class NvmeError(Exception):
    """args: kind, text.

    kind: "refused", "unreachable", "timeout", "not_found" (the subsystem), "not_supported", "denied",
    "protocol" (the target broke it), "namespace" (unknown), "closed", "lost", "unauthenticated"
    """

class NvmeController:
    """An association with a controller over TCP. Linux only. In a forked child it is closed (NvmeError)."""

    def __init__(
        self,
        host: str,
        port: int,
        subsystem_nqn: str,
        *,
        host_nqn: str,
        host_id: bytes,
        host_key: bytes = b"",  # the number of the hash that binds it to a name, then the key; empty: none
        controller_key: bytes = b"",
        queues: int = 1,  # most of each thread that reads and writes
        depth: int = 128,  # commands of a queue at once
        header_digest: bool = False,
        data_digest: bool = False,
        io_uring: bool = True,
        connect_timeout_s: float = 10.0,
        command_timeout_s: float = 30.0,
        keep_alive_s: float = 15.0,
        reconnect_timeout_s: float = 60.0,
    ) -> None: ...
    def namespaces(self) -> list[int]: ...
    def identify(self) -> dict[str, Any]:
        """serial, model, firmware, version, controller_id, mdts_bytes (0: no limit), io_capsule_bytes,
        max_queues, queue_entries, volatile_write_cache, header_digest, data_digest."""
    def open_namespace(self, nsid: int, encrypted_from: int = -1) -> dict[str, Any]:
        """encrypted_from: what is written there and behind it is; -1: nothing.

        handle, block_bytes, blocks, nguid, eui64, uuid."""
    def flush(self, nsid: int) -> None: ...
    def counters(self) -> dict[str, int]:
        """reads, writes (commands), read_bytes, write_bytes, reconnects, retries, timeouts, violations,
        uses_io_uring (1, 0; -1: not known yet)."""
    def last_loss(self) -> str: ...
    def close(self, timeout_s: float = 5.0) -> None: ...

class NvmeServer:
    """A target that gives files to read, as one namespace. Linux only. A forked child does not serve."""

    def __init__(
        self,
        listener: int,  # a descriptor, which stays the caller's
        *,
        subsystem_nqn: str,
        id: bytes,  # 16 bytes: NGUID and UUID
        head: bytes,  # the bytes at 0
        extents: list[tuple[int, int, int]],  # offset, size in bytes, descriptor, behind the head, in order
        size_bytes: int,
        host_key: bytes = b"",  # as NvmeController's
        controller_key: bytes = b"",
    ) -> None: ...
    def totals(self) -> dict[str, int]:
        """connections, turned_away, reads, read_bytes, refused_writes, violations, denied."""
    def changed(self) -> int:
        """The first extent whose file has changed; -1: none."""
    def close(self) -> None: ...

def nvme_discover(
    host: str,
    port: int,
    *,
    host_nqn: str,
    host_id: bytes,
    host_key: bytes = b"",
    controller_key: bytes = b"",
    timeout_s: float,
) -> list[dict[str, Any]]:
    """transport, address_family, address, service, subsystem_nqn, subsystem_type, port_id, controller_id,
    secure_channel."""

# The text behind the last errno of this namespace; "" if there is none.
def nvme_error_of(handle: int) -> str: ...

class Replay:
    def __init__(self, trace: dict[str, Any], machine: dict[str, Any]) -> None: ...
    def run(self, columns: tuple[Any, ...], record: bool, stop_on_deadlock: bool) -> dict[str, Any]: ...
    def static_bytes(self, columns: tuple[Any, ...]) -> npt.NDArray[np.int64]: ...
    def tier_bytes(self, columns: tuple[Any, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...

# Name, tier and codec of each action, in the order of their numbers.
def plan_actions() -> list[tuple[str, str, str]]: ...

class PlanSearch:
    """Local search over what happens in each inactive period. One thread works at a time."""

    def __init__(
        self, trace: dict[str, object], machine: dict[str, object], choices: dict[str, object]
    ) -> None: ...
    def repair(self, action: npt.NDArray[np.int8], pruned: bool) -> npt.NDArray[np.int8] | None: ...
    def improve(
        self,
        action: npt.NDArray[np.int8],
        late: npt.NDArray[np.int8],
        evaluations: int,
        seconds: float,
        target_s: float,
        temperature: float,
        seed: int,
    ) -> tuple[
        npt.NDArray[np.int8],
        npt.NDArray[np.int8],
        float,
        tuple[npt.NDArray[np.int64], ...],
        int,
        bool,
    ]: ...

def sample_sums(address: int, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """CRC-32C of stretches back to back: the first begins at address, each ends at address + its end."""

def sample_keys(names: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """What directory entries hold of names side by side, of which the i-th ends at ends[i]."""

def sample_lookup(directory: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    """The bytes of lookup.bin."""

class SampleNames:
    """Names of a store's samples. Borrows the arrays, and checks whatever it reads from them.

    ValueError where they contradict themselves.
    """

    def __init__(
        self,
        directory: npt.NDArray[np.uint64],
        names: npt.NDArray[np.uint8],
        anchors: npt.NDArray[np.uint64],
        lookup: npt.NDArray[np.uint8],
    ) -> None: ...
    def find(self, name: bytes) -> int: ...  # -1: there is none
    def find_many(
        self, names: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]: ...
    def name(self, index: int) -> bytes: ...
    def names(self, begin: int, end: int) -> list[bytes]: ...

class SampleOrder:
    """The order of one replica of an epoch, as penstock.samples.order says."""

    def __init__(
        self,
        kind: str,
        samples: int,
        firsts: npt.NDArray[np.uint64],
        seed: int,
        epoch: int,
        replicas: int,
        replica: int,
        slots: int,
        after: list[tuple[int, int, list[int]]],
        kept: npt.NDArray[np.uint64] | None = None,
    ) -> None: ...
    def take(self, samples: int) -> npt.NDArray[np.int64]: ...
    def skip(self, samples: int) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def taken(self) -> int: ...

# samples, chunks, size_bytes, buffered descriptor, direct descriptor (-1: none) or namespace,
# alignment_bytes, offset at which the data file begins in it
SampleDataFile = tuple[int, int, int, int, int, int, int]
# directory [n, 2], sums [n], chunks [c] as CHUNK_RECORD's bytes [c, 16], large [l, 2], chunk_bytes, files
SamplePartition = tuple[
    npt.NDArray[np.uint64],
    npt.NDArray[np.uint32],
    npt.NDArray[np.uint8],
    npt.NDArray[np.uint64],
    int,
    list[SampleDataFile],
]

class SampleFailure(Exception):
    """args: kind, partition, data_file, offset, size_bytes, sample (-1: several), errno.

    kind: "read" (errno says why), "checksum", "timeout", "directory" (entries that contradict themselves),
    "closed"
    """

class SampleReader:
    """Reads the samples of mounted stores: index i is the i-th over all partitions. Borrows their arrays."""

    def __init__(
        self,
        partitions: list[SamplePartition],
        *,
        buffers: int,
        direct: bool,
        verify: bool,
        copy_threads: int,
        depth: int,
        ring: bool = True,  # False: plain reads, as where io_uring is refused
        fetched: list[tuple[int, int, npt.NDArray[np.uint8], int]] = ...,
    ) -> None:
        """fetched: partition, data file, [chunks] what of each is here: 1 its body, 2 its long edge; and what
        that is a mapping of.

        Empty where nothing ever is. Who holds the reader takes what is missing, and gives it.
        """
    def take_fetches(
        self, most: int, timeout_s: float
    ) -> list[tuple[int, int, int, int, int, int, int, int, int]] | None:
        """What is to be brought: ticket, partition, data file, chunk of that file, which bit says that it is
        here; the file's bytes from where to where; from where to where they are wanted. None once closed."""
    def give_fetch(self, ticket: int, begin: int, data: npt.NDArray[np.uint8], direct_file: int) -> int:
        """data: the file's bytes from ``begin`` on, at least those that are wanted.

        Returns how many were also written to the descriptor ``direct_file``, past the page cache.
        """
    def fail_fetch(self, ticket: int, errno: int) -> None: ...
    def read(self, index: int, timeout_s: float) -> bytes: ...
    def gather(
        self, indices: npt.NDArray[np.int64], timeout_s: float
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """indices [n], data, offsets [n + 1]. Memory is reused once nobody holds it."""
    def feed(self, order: SampleOrder, ahead: int, prefetch_bytes: int, skip_damaged: bool) -> SampleFeed: ...
    def counters(self) -> dict[str, int]:
        """bytes_read, chunk_reads, sample_reads, samples, waits, io_uring (1, 0; -1: not known yet)."""
    def close(self, timeout_s: float) -> bool: ...  # False: something is still being read, and abandoned

class SampleFeed:
    """The batches of one replica of one epoch."""

    def bread(
        self, samples: int, timeout_s: float
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], npt.NDArray[np.int64]] | None:
        """indices [n], data, offsets [n + 1]; None at the end. Memory is reused once nobody holds it.

        Less those that are damaged, where these are skipped: that may be all of them. After a timeout it may
        be called again; any other failure stays.
        """
    @property
    def taken(self) -> int: ...  # samples of the order that were handed out or skipped
    def skipped(self) -> list[int]: ...  # indices of damaged samples, since the last call
    def close(self) -> None: ...

class ManagedStorage:
    """One storage of the program, or a part of a divided one.

    size_bytes  of the storage, or of the part
    died        is called with the weak reference to the storage when it has died, on any thread
    """

    def __init__(self, storage: Any, size_bytes: int, died: Callable[[Any], object]) -> None: ...
    @property
    def key(self) -> int: ...  # identifies the storage while it lives
    @property
    def size_bytes(self) -> int: ...
    @property
    def offset_bytes(self) -> int: ...  # of a part, in the storage
    @property
    def is_part(self) -> bool: ...
    address: int  # where the arena keeps it, on a CPU; 0: it does not
    state: int  # of penstock.runtime.storages.STATES
    clean: bool  # while resident: `slot` holds the same bytes
    guarded: bool  # the device notices writes to it by itself
    keeps_copy: bool  # when it is back, its copy is worth keeping valid
    freeing_bytes: int  # that are released when its copy is complete; 0: it stays
    packed_bytes: int  # that it takes on the device, compressed, while it is away; 0: none
    writing: bool  # its packed bytes are being written, or wait for it
    void: bool  # while leaving: it was written, the copy is of no use
    queued: bool  # a copy is waiting for its turn
    waits: bool  # a copy has not begun, as far as is known: until then the storage may move
    movable: bool  # it can leave the device
    lasts: bool  # it was there before the step, or the optimizer keeps it
    gone: bool  # the device took its memory by itself, and keeps a copy of its own
    reports_freed: bool  # the device is told of its death
    stays: bool  # where its memory is, as others use that too
    lies_at: int  # its address in the device's segment; 0: it is not there
    pins: int  # kernels that use it now, and what runs beside them
    @property
    def in_kernel(self) -> bool: ...  # the clock's kernel that runs uses it
    recipes: int  # to run kernels again, that hold only while it is not written
    index: int  # number in the trace of the step `step`
    step: int
    birth: int  # kernel of that step that made it, else -1
    kind: int  # of penstock.core.trace.KINDS, as an index; -1: it is not known
    slot: Any  # where its copy is, or will be; what it is only the device knows. None: it has none
    hold: Any  # what keeps the storage alive while a copy is under way
    place: Any  # where the device keeps it; what it is only the device knows
    # Of a divided storage, from this one on; of another one, itself.
    def parts(self) -> list[ManagedStorage]: ...
    def storage(self) -> Any: ...  # torch.UntypedStorage, None once it is dead

class Storages:
    """The storages that are alive, found by their tensors.

    adopt         decides whether a storage can be moved, and prepares it: called once for each one, with
                  whether a kernel has just made it
    on_freed      called with each one that has died: all, or if not `reports_all`, those with a copy, and
                  those that `reports_freed` marks
    first_serial  storages in blocks of the arena from this one on are movable, and `adopt` is not asked
                  about them; 0: there are none
    """

    reports_all: bool
    part_bytes: int  # of what is divided; 0: nothing is
    @property
    def has_divided(self) -> bool: ...
    divisible_bytes: int  # weights of so many are divided, and what is as large as one of them

    def __init__(
        self,
        adopt: Callable[[ManagedStorage, Any, bool], bool],
        on_freed: Callable[[ManagedStorage], object],
        smallest_bytes: int,
        first_serial: int = 0,
    ) -> None: ...
    # None where it was not met before; of a divided one the first part, as for `track`.
    def find(self, storage: Any) -> ManagedStorage | None: ...
    def divide(self, managed: ManagedStorage) -> None: ...  # into parts, where the arena can
    # made: a kernel has just made it
    def track(self, storage: Any, made: bool = False) -> ManagedStorage: ...
    # What kernels make on the torch.device is adopted from now on without asking, and counts in `memory`.
    def adopt_results(self, device: Any, memory: DeviceMemory) -> None: ...
    def at(self, address: int) -> ManagedStorage | None: ...
    def move_to_end(self, managed: ManagedStorage) -> None: ...  # of `by_use`: it was used now
    def clear_address(self, managed: ManagedStorage) -> None: ...  # the arena no longer keeps it
    def remove_dead(self) -> None: ...  # forget those that have died; call it before storages are looked up
    def untrack(self, storage: Any) -> None: ...  # its memory is another one: forget it too
    def all(self) -> list[ManagedStorage]: ...

    # Movable ones, the least recently used first. Those that are not resident are among them.
    def by_use(self) -> list[ManagedStorage]: ...
    def all_resident(self) -> bool: ...  # of the movable ones
    def __len__(self) -> int: ...

class Leaves(enum.Enum):
    """What may leave the device for a block, besides moving within it.

    leaving   what is leaving, for a large block, which then goes where it leaves most room for another one
    """

    nothing = 0
    leaving = 1
    anything = 2

class DeviceSegment:
    """One large segment of a device's memory, followed as torch's caching allocator divides it."""

    free_bytes: int
    largest_free_bytes: int
    def __init__(self, address: int, size_bytes: int) -> None: ...
    def clear(self) -> None: ...  # no storage is in it any more: it is followed no longer
    def put(self, managed: ManagedStorage, address: int) -> None: ...  # the storage has memory there
    def take(self, managed: ManagedStorage) -> None: ...  # it has none any more
    def hold(self, address: int, size_bytes: int) -> None: ...  # memory that no storage has
    def give_up(self, address: int) -> None: ...
    def free_at(self, address: int) -> int: ...  # bytes of the free block that begins there, or 0
    def fits(self, sizes: Sequence[int]) -> bool: ...  # together

    # Where it costs least to make a free block of so many bytes: what moves elsewhere, what leaves, and the
    # free blocks in between. None: what cannot move is everywhere.
    def obstacles(
        self, size_bytes: int, leaves: Leaves
    ) -> tuple[list[ManagedStorage], list[ManagedStorage], list[tuple[int, int]]] | None: ...

class DeviceMemory:
    """Bytes of the device, as kernels see them.

    reserved_bytes   in use when the kernel began, and what it takes
    known_bytes      in use by storages that can leave, where they are not in the arena
    beside_bytes     in use otherwise, less what in the arena belongs to others
    asks_in          after so many kernels Python asks the device again what beside_bytes is
    segment          that large storages are in: what is not free there is in use; None where there is none
    """

    budget_bytes: int
    reserved_bytes: int
    known_bytes: int
    beside_bytes: int
    asks_in: int
    in_arena: bool
    segment: DeviceSegment | None
    def __init__(self) -> None: ...
    def in_use_bytes(self) -> int: ...  # in the arena, and beside it

class Stage(enum.Enum):
    """What a rank has done with a piece, in this order."""

    filled = 0
    summed = 1

class RankProgress:
    """How far each of several processes is, in memory that they share. Linux only.

    address   of `bytes` bytes of that memory, which were zero at first
    watched   a pidfd of each rank; -1 for this one
    depth     pieces in flight
    """

    depth: ClassVar[int]
    def __init__(self, address: int, ranks: int, rank: int, watched: Sequence[int]) -> None: ...
    @staticmethod
    def bytes(ranks: int) -> int: ...
    def mark(self, stage: Stage, pieces: int, what: int = 0) -> None:
        """This rank has done so many, all told. what: of the last one, for the others to compare."""

    def what(self, rank: int, piece: int) -> int: ...
    def fail(self) -> None:
        """This rank does no more."""

    def wait(self, stage: Stage, pieces: int, timeout_s: float) -> tuple[int, str]:
        """Until all ranks have done so many: (-1, ""). Else the rank that has not, and "late", "gone" (its
        process) or "failed"."""

class KernelClock:
    """What the clock of kernels does for every operator: see csrc/runtime/dispatch.hpp. Called as the
    __torch_dispatch__ of a penstock.runtime.clock.Clock, which it asks for what takes more."""

    entered: bool  # operators are looked at
    in_step: bool
    views_need_bytes: bool  # torch refuses views of what is away
    asks_needs: bool  # what a kernel takes must be right: Python infers it where it was not planned
    watches: bool  # kernels are recorded
    notes: bool  # how to run the kernel that begins again
    in_flight: bool  # collectives have returned, and are not done
    excluded_s: float  # of what was done for the kernel that begins, but is not the clock's own
    activation: int  # index of this kind of tensor
    def __init__(
        self,
        *,
        storages: Storages,
        memory: DeviceMemory,
        lock: Any,
        prefetches: Any,
        unpinned: Any,
        tensor: type,
        parameter: type,
        buffer: type,
        storage: type,
        overload: type,
        untyped_storage: Any,
        set_compiler: Callable[[Any], Any],
        current_stream: Callable[[], Any] | None,
    ) -> None: ...
    def __call__(
        self, clock: Any, torch_operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any: ...
    def run(
        self, clock: Any, torch_operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any: ...
    def divide(self, clock: Any, weight: ManagedStorage) -> None: ...  # where it is large enough, and can be
    def begin_step(self, schedule: Any) -> None: ...
    def follow(self, schedule: Any) -> None: ...  # from this kernel on
    def tensor(self, index: int) -> ManagedStorage | None: ...  # of those that the step has touched
    def numbered(self, first: int = 0) -> list[ManagedStorage]: ...  # that the step has touched, in order
    def seen(self) -> list[str]: ...  # names of the kernels that have run
    def touched_bytes(self) -> int: ...
    @property
    def schedule(self) -> Any: ...
    @property
    def step(self) -> int: ...
    @property
    def kernels(self) -> int: ...
    @property
    def operators(self) -> int: ...
    @property
    def clock_s(self) -> float: ...
    @property
    def left_s(self) -> float: ...  # when the latest kernel was over
