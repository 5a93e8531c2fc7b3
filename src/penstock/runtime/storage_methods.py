"""Methods of torch.UntypedStorage, in a run: they are no operators.

Some give a storage other memory. On an accelerator what is away has a storage of 0 bytes, and torch.save,
pickle and copy.deepcopy copy storages by such methods: in a run they say how large a storage is when it is
there, and find its bytes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.utils.dlpack

from penstock.capture.operators import storages_in
from penstock.errors import BudgetTooSmall, InvalidArgument
from penstock.runtime.storages import LEAVING, ManagedStorage, Storages
from penstock.runtime.torch_patches import replace

if TYPE_CHECKING:
    from penstock.runtime.copy_engine import CopyEngine
    from penstock.runtime.devices import Device
    from penstock.runtime.interrupts import Interrupts
    from penstock.runtime.recompute import Recomputation

Storage: TypeAlias = torch.UntypedStorage

# As torch has them, whatever is in their places.
held_bytes = torch._C.StorageBase.nbytes
resize = torch._C.StorageBase.resize_

# Those that access the bytes; True: they write to them.
_ACCESSES = {
    "__getitem__": False,
    "__setitem__": True,
    "_set_from_file": True,
    "_write_file": False,
    "copy_": True,
    "fill_": True,
}
# By which other libraries get a tensor's memory.
_EXPORTS = (
    (torch, "to_dlpack"),
    (torch.utils.dlpack, "to_dlpack"),
    (torch._C, "_to_dlpack"),  # that of Tensor.__dlpack__, and the next one
    (torch._C, "_to_dlpack_versioned"),
)
_NO_ADDRESS = 1 << 63  # no device has memory there


class StorageAccess:
    """Accesses to storages that are no operators: the clock sees none of them. On any thread."""

    def __init__(
        self,
        device: Device,
        engine: CopyEngine,
        storages: Storages,
        recomputation: Recomputation,
        interrupts: Interrupts,
        end_kernel: Callable[[], None],
    ) -> None:
        self._device, self._engine, self._storages = device, engine, storages
        self._recomputation, self._end_kernel = recomputation, end_kernel
        self._interrupts: Interrupts | _Refused = interrupts  # first of all in each access
        self._addressed: dict[ManagedStorage, None] = {}
        self._launching = _Launching()
        self._lent: list[ManagedStorage] = []  # as often as it is

    @contextlib.contextmanager
    def present(
        self,
        storages: Iterable[Storage],
        written: Sequence[Storage] = (),
        stays: bool = False,
        launched: bool = False,
    ) -> Iterator[None]:
        """The bytes of these are on the device meanwhile.

        written    of them, what is written to
        stays      they do not leave any more
        launched   by work for this thread's stream, which waits for what comes
        """
        used: list[ManagedStorage] = []
        storages = [storage for storage in storages if self._device.has(storage)]
        if not storages:
            yield
            return
        with self._interrupts:
            with self._engine.lock:
                within = self._engine.memory.reserved_bytes  # of a kernel that does this
                self._device.begin_kernel()
                self._storages.remove_dead()
                used += dict.fromkeys(part for storage in storages for part in self._movable(storage))
                self._pin(used, written)
            before = self._launching.there
            if launched:
                self._launching.there = frozenset(storage._cdata for storage in storages)
            try:
                if not launched:
                    self._device.synchronize()
                yield
            finally:
                self._launching.there = before
                with self._engine.lock:
                    for managed in used:
                        managed.pins += stays
                    self._unpin(used)
                    if not within:
                        self._end_kernel()

    def hold_addresses(self, storages: Sequence[Storage]) -> None:
        """The program takes their addresses, and may write there: until `let_addresses_go` they are on the
        device, and stay where they are."""

        def is_wanted(managed: ManagedStorage) -> bool:
            # What else is pinned is used by a kernel, which has said what it writes.
            is_free = not managed.pins or managed.state > LEAVING or managed in self._lent
            return is_free and managed not in self._addressed

        def hold(used: Sequence[ManagedStorage]) -> None:
            self._addressed |= dict.fromkeys(used)

        self._give(storages, is_wanted, hold)

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """The program gives others the tensor's memory, and they may write there: until what is returned, of
        the same memory, is gone, it is on the device, and stays where it is."""
        lent = tensor.detach()
        given: list[ManagedStorage] = []
        weakref.finalize(lent, self._end_loan, given).atexit = False

        def hold(used: Sequence[ManagedStorage]) -> None:
            given.extend(used)
            self._lent.extend(used)

        self._give(storages_in(tensor), lambda managed: True, hold)
        return lent

    def _end_loan(self, given: list[ManagedStorage]) -> None:
        """On any thread, whatever it has locked."""
        for managed in given:
            managed.pins -= 1
            self._lent.remove(managed)

    def _give(
        self,
        storages: Sequence[Storage],
        is_wanted: Callable[[ManagedStorage], bool],
        hold: Callable[[Sequence[ManagedStorage]], None],
    ) -> None:
        """Pin what is wanted of them and can move, for ``hold`` to have, and count it as written."""
        storages = [storage for storage in storages if self._device.has(storage)]
        if not storages:
            return
        with self._interrupts, self._engine.lock:
            self._storages.remove_dead()
            parts = dict.fromkeys(part for each in storages for part in self._storages.track(each).parts())
            used = [part for part in parts if part.movable and is_wanted(part)]
            if not used:
                return
            self._pin(used, storages)
            hold(used)
            self._end_kernel()
        self._device.synchronize()  # for what comes: who uses the address may be no kernel

    def let_addresses_go(self) -> None:
        """With the engine's lock held."""
        for managed in self._addressed:
            managed.pins -= 1
        self._addressed.clear()

    def _movable(self, storage: Storage) -> list[ManagedStorage]:
        """What can move of it: it, or its parts."""
        managed = self._storages.find(storage)
        return [part for part in managed.parts() if part.movable] if managed is not None else []

    def _bring(self, used: list[ManagedStorage], written: Sequence[Storage]) -> None:
        if any(managed.state > LEAVING for managed in used):
            self._engine.demand(used)
        for storage in written:
            for managed in self._movable(storage):
                self._recomputation.will_write(managed)
                self._engine.will_write(managed)

    def _pin(self, used: list[ManagedStorage], written: Sequence[Storage]) -> None:
        """They are on the device until `_unpin`."""
        for managed in used:
            managed.pins += 1
        try:
            self._bring(used, written)
        except BaseException:
            self._unpin(used)
            self._end_kernel()
            raise

    def _unpin(self, used: Iterable[ManagedStorage]) -> None:
        for managed in used:
            managed.pins -= 1
            self._storages.move_to_end(managed)

    def away_bytes(self, storage: Storage) -> int:
        """That the storage has when it is on the device; 0: there it is."""
        if not self._device.has(storage):
            return 0
        with self._interrupts, self._engine.lock:
            self._storages.remove_dead()
            managed = self._storages.find(storage)
            return managed.size_bytes if managed is not None and managed.state > LEAVING else 0

    def leave_to_parent(self) -> None:
        """In a process made by fork, where the engine's lock may be held for ever."""
        self._interrupts = _Refused()

    def replace_methods(self, undo: contextlib.ExitStack, resized: Callable[[ManagedStorage], None]) -> None:
        """Take the places of torch's own methods until ``undo`` is closed.

        resized   is told of each storage that got other memory
        """
        methods = {"resize_": self._resizing(resized)}
        if self._device.memory.in_arena:
            for name in ("share_memory_", "_share_fd_cpu_", "_share_filename_cpu_"):
                methods[name] = self._sharing(getattr(Storage, name))
        else:
            methods |= _methods_of_empty_storages(self)
            replace(undo, torch._tensor_str, "_str", self._printing(torch._tensor_str._str))
            replace(undo, torch.Tensor, "data_ptr", self._addressing(torch.Tensor.data_ptr))
            for owner, name in _EXPORTS:
                if hasattr(owner, name):
                    replace(undo, owner, name, self._exporting(getattr(owner, name)))
        for name, method in methods.items():
            replace(undo, Storage, name, method)

    def _printing(self, text: Callable[..., str]) -> Callable[..., str]:
        """In the place of what makes the text of a tensor, and turns all modes off for it."""

        def text_of(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> str:
            storages = [storage for storage in storages_in(tensor) if self._device.has(storage)]
            if not storages:
                return text(tensor, *args, **kwargs)
            with self.present(storages):
                while True:
                    try:
                        return text(tensor, *args, **kwargs)
                    except RuntimeError as error:  # what its kernels make nobody makes room for
                        with self._interrupts, self._engine.lock:
                            if not self._device.room.frees_enough(error, tensor.nbytes):
                                raise

        return text_of

    def _addressing(self, address: Callable[[torch.Tensor], int]) -> Callable[[torch.Tensor], int]:
        """In the place of Tensor.data_ptr. Who asks may use the address, or compare it with that of a view,
        which brings the tensor back, so it is the one that the bytes have."""

        @functools.wraps(address)
        def data_ptr(tensor: torch.Tensor) -> int:
            if _is_of_program(tensor):
                there = self._launching.there  # what a launcher asks for, one by one
                if not there or tensor.untyped_storage()._cdata not in there:
                    self.hold_addresses(storages_in(tensor))
            return address(tensor)

        return data_ptr

    def _exporting(self, export: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of what makes a capsule of DLPack, which keeps the tensor that it is made of."""

        @functools.wraps(export)
        def exported(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return export(self.lend(tensor) if _is_of_program(tensor) else tensor, *args, **kwargs)

        return exported

    def _resizing(self, resized: Callable[[ManagedStorage], None]) -> Callable[[Storage, int], Storage]:
        """In the place of UntypedStorage.resize_: FSDP2 frees gathered parameters with it, and allocates them
        again. To the run it is another storage then."""

        def resize_(storage: Storage, size: int) -> Storage:
            if not self._device.has(storage):
                return resize(storage, size)
            # What is away on an accelerator is empty, and neither freed nor allocated by the program.
            needed = size > 0 or not self._device.memory.in_arena
            with self._interrupts, self._engine.lock:
                self._storages.remove_dead()
                managed = self._storages.find(storage)
                parts = managed.parts() if managed is not None else []
                for part in parts:
                    part.pins += 1
            try:
                with self._interrupts, self._engine.lock:
                    for part in parts:
                        self._recomputation.will_write(part)
                        self._engine.wait_until_unused(part, needed)
                    self._engine.make_room(max(size - storage.nbytes(), 0), expected=True)
                while not self._device.resize(storage, size):
                    with self._interrupts, self._engine.lock:
                        self._engine.make_some_room(size)
            finally:
                for part in parts:
                    part.pins -= 1
            with self._interrupts, self._engine.lock:
                self._storages.untrack(storage)
                for part in self._storages.track(storage, made=True).parts():
                    resized(part)
                self._end_kernel()
            return storage

        return resize_

    def _sharing(self, share: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of what gives a storage memory that other processes have too, and frees what it had,
        as queues of multiprocessing do. To the run it is another storage then."""

        def shared(storage: Storage, *args: Any, **kwargs: Any) -> Any:
            with self._interrupts, self._engine.lock:
                self._storages.remove_dead()
                parts = self._movable(storage)
                for part in parts:
                    part.pins += 1
            if not parts:
                return share(storage, *args, **kwargs)
            try:
                with self._interrupts, self._engine.lock:
                    for part in parts:
                        try:
                            self._recomputation.will_write(part)
                            self._engine.wait_until_unused(part, needed=True)
                        except BudgetTooSmall:  # the arena brings it in while it is copied
                            self._engine.wait_until_unused(part, needed=False)
                    self._engine.make_room(sum(part.size_bytes for part in parts), expected=True)
                return share(storage, *args, **kwargs)
            finally:
                with self._interrupts, self._engine.lock:
                    for part in parts:
                        part.pins -= 1
                    if parts[0].address and storage.data_ptr() != parts[0].address:
                        for part in parts:
                            self._recomputation.will_write(part)
                            # Another thread may have demanded it.
                            self._engine.wait_until_unused(part, needed=False)
                        self._storages.untrack(storage)
                        self._storages.remove_dead()
                        with contextlib.suppress(BudgetTooSmall):  # what is shared is there
                            self._storages.track(storage)

        return shared


class _Launching(threading.local):
    """there   storages that the launch under way on this thread is given, by `_cdata`"""

    there: frozenset[int] = frozenset()


class _Refused(contextlib.AbstractContextManager[None]):
    def __enter__(self) -> None:
        raise InvalidArgument(
            "a process made by fork cannot read the tensors of its parent's run on an accelerator: give it "
            "copies on the CPU, as by tensor.cpu(), or make it by spawn"
        )

    def __exit__(self, *_: object) -> None:
        pass


def _is_of_program(tensor: torch.Tensor) -> bool:
    """Whether the program asks. Kernels, which run below the mode, have what they use, and ask often."""
    return bool(torch._C._len_torch_dispatch_stack()) or not _has_bytes(tensor)


def _has_bytes(tensor: torch.Tensor) -> bool:
    try:
        return held_bytes(tensor.untyped_storage()) > 0
    except (NotImplementedError, RuntimeError):  # it has no storage
        return True


def _methods_of_empty_storages(access: StorageAccess) -> dict[str, Callable[..., Any]]:
    """By name, what takes the places of torch's on an accelerator."""
    replaced: dict[str, Callable[..., Any]] = {}

    def replaces(*names: str) -> Callable[[Callable[..., Any]], None]:
        def replace(method: Callable[..., Any]) -> None:
            replaced.update(dict.fromkeys(names, method))

        return replace

    @replaces("nbytes", "size", "__len__")
    def size(storage: Storage) -> int:
        return held_bytes(storage) or access.away_bytes(storage)

    @replaces("data_ptr")
    def data_ptr(storage: Storage) -> int:
        """Storages are told apart by it: torch.save and safetensors do. What is away has no address."""
        if not held_bytes(storage) and access.away_bytes(storage):
            return _NO_ADDRESS | storage._cdata
        return torch._C.StorageBase.data_ptr(storage)

    @replaces("clone")
    def clone(storage: Storage) -> Storage:
        """By an operator, for which there is room."""
        with access.present([storage]):
            view = torch.empty(0, dtype=torch.uint8, device=storage.device)
            return view.set_(storage, 0, (held_bytes(storage),), (1,)).clone().untyped_storage()  # type: ignore[call-overload, no-any-return]

    @replaces("to")
    def to(storage: Storage, *, device: Any, non_blocking: bool = False) -> Storage:
        """To memory of an operator, too. torch.load does it."""
        if storage.device == torch.device(device):
            return storage
        made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
        return made.copy_(storage, non_blocking)

    @replaces("_share_cuda_")
    def share(storage: Storage, *args: Any, **kwargs: Any) -> Any:
        """Other processes have its memory from now on."""
        with access.present([storage], stays=True):
            return torch._C.StorageBase._share_cuda_(storage, *args, **kwargs)

    for name, writes in _ACCESSES.items():
        replaced[name] = _accessing(access, getattr(Storage, name), writes)
    return replaced


def _accessing(access: StorageAccess, method: Callable[..., Any], writes: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def accessing(storage: Storage, *args: Any, **kwargs: Any) -> Any:
        others = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.UntypedStorage))
        with access.present([storage, *others], written=[storage] if writes else ()):
            return method(storage, *args, **kwargs)

    return accessing
