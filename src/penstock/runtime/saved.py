"""Activations leave and come back through autograd's saved-tensor hooks.

Whole storages move, once for each version, however many views autograd saved of them. A hold dies
with the backward node that owns it, and with its last hold a storage is forgotten.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch

from penstock.errors import SavedTensorModified
from penstock.runtime.mover import Mover, Saved
from penstock.runtime.schedule import Schedule

# Smaller storages cost more to move than they free.
SMALLEST_BYTES = 4096

Fingerprint = tuple[torch.dtype, torch.Size, tuple[int, ...]]


def _check_version(current: int, saved: int, shape: torch.Size, dtype: torch.dtype) -> None:
    """What autograd checks itself where no hooks are set."""
    if current != saved:
        raise SavedTensorModified(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {list(shape)} and type {dtype} is at version {current}; "
            f"expected version {saved} instead. Let the operation that changes it work on a copy."
        )


class _Kept:
    """A saved tensor that does not move: a parameter, an input, or something too small or too special."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version

    def unpack(self) -> torch.Tensor:
        _check_version(self.tensor._version, self.version, self.tensor.shape, self.tensor.dtype)
        return self.tensor


class _Hold:
    """Autograd's hold of one view of a saved storage."""

    __slots__ = ("alias", "dtype", "offset", "saved", "shape", "stride", "version")

    def __init__(self, saved: Saved, tensor: torch.Tensor) -> None:
        self.saved = saved
        self.dtype, self.offset = tensor.dtype, tensor.storage_offset()
        self.shape, self.stride = tensor.shape, tensor.stride()
        # An alias shares the version counter of the tensor; emptied, it keeps no memory.
        self.version = tensor._version
        self.alias = tensor.detach()
        self.alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        _check_version(self.alias._version, self.version, self.shape, self.dtype)
        view = torch.empty(0, dtype=self.dtype, device=storage.device)
        return view.set_(storage, self.offset, self.shape, self.stride)  # type: ignore[call-overload, no-any-return]


class _RecordedHold(_Hold):
    """A hold whose release is recorded.

    Apart, because an interrupt that strikes while Python code runs in a destructor is lost.
    """

    __slots__ = ("recorder",)

    def __init__(self, saved: Saved, tensor: torch.Tensor, recorder: Recorder) -> None:
        super().__init__(saved, tensor)
        self.recorder = recorder
        recorder.holds(saved.tensor, +1)

    def __del__(self) -> None:
        self.recorder.holds(self.saved.tensor, -1)


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """The hooks of one run. Enter them around a step, after `begin_step`.

    departed       this step is not the one that was traced
    fingerprints   of every storage saved in this step, in order
    """

    def __init__(
        self, mover: Mover, device: torch.device, is_movable: Callable[[torch.UntypedStorage], bool]
    ):
        super().__init__(self._pack, self._unpack)
        self._mover = mover
        self._device = device
        self._is_movable = is_movable
        mover.on_prepared = self._note_memory
        self._known: weakref.WeakValueDictionary[tuple[int, int], Saved] = weakref.WeakValueDictionary()
        self._of_step: weakref.WeakValueDictionary[int, Saved] = weakref.WeakValueDictionary()
        self.begin_step(schedule=None, expected=(), default_tier="disk", fixed=(), recorder=None)

    def begin_step(
        self,
        *,
        schedule: Schedule | None,
        expected: tuple[Fingerprint, ...],
        default_tier: str,
        fixed: Iterable[torch.Tensor],
        recorder: Recorder | None,
    ) -> None:
        """Prepare for a step.

        schedule       what to do; None moves everything out as soon as it is saved
        expected       fingerprints of the step the schedule was made from
        default_tier   where to what the schedule does not know goes
        fixed          tensors that never move: parameters, buffers, optimizer state
        recorder       is told what happens, when the step is recorded
        """
        self._schedule = schedule
        self._expected = expected
        self._default_tier = default_tier
        self._fixed = {tensor.untyped_storage()._cdata for tensor in fixed}
        self._recorder = recorder
        self._known.clear()
        self._of_step.clear()
        self._loads = 0
        self._event = 0
        self.departed = False
        self.fingerprints: list[Fingerprint] = []

    # -- autograd saves ------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> _Kept | _Hold:
        if self._recorder is None:
            return self._save(tensor)
        with self._recorder.paused(), self._stalls_excluded(self._recorder):
            return self._save(tensor)

    def _save(self, tensor: torch.Tensor) -> _Kept | _Hold:
        if not self._can_move(tensor):
            return _Kept(tensor)
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version)
        saved = self._known.get(key)
        if saved is None or not saved.is_in(storage):
            saved = self._first_save(tensor, storage)
            self._known[key] = saved
        if self._recorder is None:
            return _Hold(saved, tensor)
        return _RecordedHold(saved, tensor, self._recorder)

    def _can_move(self, tensor: torch.Tensor) -> bool:
        if (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.layout is not torch.strided
            or tensor.device != self._device
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.is_quantized
        ):
            return False
        storage = tensor.untyped_storage()
        return (
            storage.nbytes() >= SMALLEST_BYTES
            and storage._cdata not in self._fixed
            and self._is_movable(storage)
        )

    def _first_save(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Saved:
        number = len(self.fingerprints)
        fingerprint = (tensor.dtype, tensor.shape, tensor.stride())
        self.fingerprints.append(fingerprint)
        recorded = -1 if self._recorder is None else self._recorder.storage_of(storage)
        saved = Saved(number, storage, recorded)
        self._of_step[number] = saved
        if self._recorder is not None:
            self._recorder.saved(recorded)
        if self._schedule is not None and (
            number >= len(self._expected) or self._expected[number] != fingerprint
        ):
            self._depart()
        if self._schedule is None:
            if saved.copy is None:  # a departure just now may have seen to it
                self._mover.evict(saved, self._default_tier, self._event)
        elif departure := self._schedule.departures.get(number):
            self._mover.evict(saved, departure.tier, departure.due, stays=departure.stays)
        self._tick()
        return saved

    # -- autograd loads ------------------------------------------------------------------------

    def _unpack(self, packed: _Kept | _Hold) -> torch.Tensor:
        if self._recorder is None:
            return self._load(packed)
        with self._recorder.paused(), self._stalls_excluded(self._recorder):
            return self._load(packed)

    def _load(self, packed: _Kept | _Hold) -> torch.Tensor:
        if isinstance(packed, _Kept):
            return packed.unpack()
        saved = packed.saved
        is_of_step = self._of_step.get(saved.number) is saved
        if not is_of_step:  # of a graph that an earlier step left
            saved.number = -1
        storage = self._mover.demand(saved, self._event, self._ahead_bytes(self._event))
        tensor = packed.view(storage)
        if isinstance(packed, _RecordedHold) and packed.recorder is self._recorder:
            self._recorder.loaded(saved.tensor, storage)
        if not is_of_step:
            self._mover.let_go(saved)
            return tensor
        load = self._loads
        self._loads += 1
        if self._schedule is not None and (
            load >= len(self._schedule.save_of_load) or self._schedule.save_of_load[load] != saved.number
        ):
            self._depart()
        if self._schedule is None or load in self._schedule.drops:
            self._mover.let_go(saved)
        self._tick()
        return tensor

    def _note_memory(self, saved: Saved, target: torch.UntypedStorage) -> None:
        if self._recorder is not None and self._of_step.get(saved.number) is saved:
            self._recorder.brought_back(saved.tensor, target)

    @contextlib.contextmanager
    def _stalls_excluded(self, recorder: Recorder) -> Iterator[None]:
        """Waiting is not the program's own time."""
        before = len(self._mover.waits)
        yield
        recorder.exclude(sum(wait.finished_s - wait.started_s for wait in self._mover.waits[before:]))

    # -- the clock -----------------------------------------------------------------------------

    def _tick(self) -> None:
        """One more save or load: the runtime's clock."""
        event = self._event
        self._event += 1
        if self._schedule is not None:
            for number in self._schedule.prefetches.get(event, ()):
                saved = self._of_step.get(number)
                if saved is not None:
                    self._mover.prefetch(saved)
        self._mover.settle(event, self._ahead_bytes(event))

    def _ahead_bytes(self, event: int) -> int | None:
        """What the plan expects before the next event; None where there is no plan, or it ends."""
        if self._schedule is None or event >= len(self._schedule.ahead_bytes):
            return None
        return self._schedule.ahead_bytes[event]

    def _depart(self) -> None:
        """The step is not the one that was traced: for the rest of it, everything moves out."""
        self.departed = True
        self._schedule = None
        for saved in list(self._of_step.values()):
            if saved.copy is None:
                self._mover.evict(saved, self._default_tier, self._event)
