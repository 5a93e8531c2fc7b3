"""Where moDNN's copies go, which of them are still valid, and when the links are free."""

from __future__ import annotations

import numpy as np

from penstock.core.columns import IntArray
from penstock.core.hardware import Hardware
from penstock.core.trace import Trace
from penstock.errors import SpillSpaceFull
from penstock.units import format_bytes, format_bytes_up


class Tiers:
    """Room on the host and on the disk, and the transfers decided so far.

    The host comes first. A copy is counted until the kernel that needs it has run; a persistent tensor's
    copy is counted all the time.
    """

    def __init__(self, trace: Trace, hardware: Hardware) -> None:
        self.trace, self.hardware = trace, hardware
        self.free: dict[str, IntArray] = {
            tier: np.full(trace.kernels, hardware.capacity_bytes(tier), dtype=np.int64)
            for tier in ("host", "disk")
            if hardware.capacity_bytes(tier) > 0
        }
        self.busy_until_s = dict.fromkeys(
            ("device_to_host", "disk_write", "host_to_device", "disk_read"), 0.0
        )
        self._valid: dict[int, str] = {}  # by tensor: where its copy is that is still valid
        self._home: dict[int, tuple[str, int]] = {}  # by tensor: tier, and until when its copy has room
        self._seconds: dict[tuple[bool, str, int], float] = {}

    def choose(self, tensor: int, after: int, end: int) -> str | None:
        """The tier for a copy made after kernel ``after`` that is needed until kernel ``end``, if any."""
        if self._settled(tensor):
            tier, until = self._home[tensor]
            return tier if self._fits(tier, tensor, until, end) else None
        return next((tier for tier in self.free if self._fits(tier, tensor, after + 1, end)), None)

    def take(self, tier: str, tensor: int, after: int, end: int) -> None:
        """Keep the room that `choose` found."""
        since = self._home[tensor][1] if self._settled(tensor) else after + 1
        since, until = self._span(tensor, since, end)
        self.free[tier][since:until] -= self.trace.tensor_bytes[tensor]
        self._home[tensor] = (tier, max(until, since))
        self._valid[tensor] = tier

    def home(self, tensor: int) -> str:
        return self._home[tensor][0]

    def written(self, tensor: int) -> None:
        """A kernel writes the tensor: its copy is no longer valid."""
        self._valid.pop(tensor, None)

    def write_s(self, tier: str, tensor: int) -> float:
        """Seconds to copy the tensor out; 0 where a copy is still valid."""
        return 0.0 if self._valid.get(tensor) == tier else self._transfer_s(True, tier, tensor)

    def read_s(self, tier: str, tensor: int) -> float:
        return self._transfer_s(False, tier, tensor)

    def write(self, tier: str, tensor: int, ready_s: float, now_s: float) -> float:
        """Copy the tensor out as soon as it is complete and the link is free: when its memory is free."""
        if self._valid.get(tensor) == tier:
            return now_s
        return max(now_s, self._run(self.hardware.evict_links(tier), ready_s, self.write_s(tier, tensor)))

    def read(self, tier: str, tensor: int, from_s: float) -> float:
        """Copy the tensor back: when it is there."""
        return self._run(self.hardware.prefetch_links(tier), from_s, self.read_s(tier, tensor))

    def hidden_s(self, now_s: float) -> float:
        """Seconds that the links out have been idle until now: copying that costs nothing."""
        links = {link for tier in self.free for link in self.hardware.evict_links(tier)}
        return max(now_s - max((self.busy_until_s[link] for link in links), default=now_s), 0.0)

    @property
    def reading_until_s(self) -> float:
        return max(self.busy_until_s["host_to_device"], self.busy_until_s["disk_read"])

    def full(self, budget_bytes: int, tensor: int) -> SpillSpaceFull:
        """The error for a tensor, or a workspace, that no eviction can make room for."""
        hardware = self.hardware
        what = "a workspace"
        if tensor < self.trace.tensors:
            size = format_bytes_up(int(self.trace.tensor_bytes[tensor]))
            what = f"tensor {tensor} of {size}"
        return SpillSpaceFull(
            f"the policy 'modnn' finds no room for {what} within {format_bytes(budget_bytes)}: the host "
            f"budget of {format_bytes(hardware.host_bytes)} and the disk budget of "
            f"{format_bytes(hardware.disk_bytes)} are used up. Raise either, or raise the device budget."
        )

    def _settled(self, tensor: int) -> bool:
        """The next copy is on the tier of the last: it is still valid, or that room is kept anyway."""
        if tensor not in self._home:
            return False
        return tensor in self._valid or bool(self.trace.tensor_persistent[tensor])

    def _span(self, tensor: int, since: int, end: int) -> tuple[int, int]:
        """The kernels during which a copy takes room that it has not taken yet."""
        if self.trace.tensor_persistent[tensor]:
            end = self.trace.kernels
            since = 0 if tensor not in self._home else end
        else:
            end = min(end + 1, self.trace.kernels)
        return min(since, end), end

    def _fits(self, tier: str, tensor: int, since: int, end: int) -> bool:
        since, until = self._span(tensor, since, end)
        return bool((self.free[tier][since:until] >= self.trace.tensor_bytes[tensor]).all())

    def _transfer_s(self, out: bool, tier: str, tensor: int) -> float:
        size = int(self.trace.tensor_bytes[tensor])
        key = (out, tier, size)
        if key not in self._seconds:
            copy_s = self.hardware.evict_s if out else self.hardware.prefetch_s
            self._seconds[key] = copy_s(tier, size)
        return self._seconds[key]

    def _run(self, links: tuple[str, ...], from_s: float, seconds: float) -> float:
        start_s = max(from_s, *(self.busy_until_s[link] for link in links))
        for link in links:
            self.busy_until_s[link] = start_s + seconds
        return start_s + seconds
