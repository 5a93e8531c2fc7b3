"""How busy a plan keeps the links: the estimate with which G10 chooses (section 4.3)."""

from __future__ import annotations

import numpy as np

from penstock.core.columns import FloatArray
from penstock.core.hardware import Hardware
from penstock.core.trace import Trace
from penstock.planners.heuristics import cyclic

_EXACT = 1 - 1e-9  # transfers that end with a kernel, up to rounding, end with it


class Traffic:
    """The seconds for which each link is still free during each kernel, if kernels never wait.

    Transfers to the disk also use the bus where it is shared, for as long as they would take alone.
    """

    def __init__(self, trace: Trace, hardware: Hardware, tiers: tuple[str, ...]) -> None:
        self.kernels, self.hardware = trace.kernels, hardware
        # A kernel that takes no time still separates those before it from those after.
        self.duration_s = trace.kernel_time_s + 1e-12 * (trace.ideal_s or 1.0)
        links_of = (hardware.evict_links, hardware.prefetch_links)
        routes = [links(tier) for tier in tiers for links in links_of]
        self.free_s = {link: self.duration_s.copy() for links in routes for link in links}
        self.alone_s = cyclic.unrolled(self.duration_s)
        self.sums_s = {link: cyclic.unrolled(free) for link, free in self.free_s.items()}

    def away_from(self, tier: str, begin: int, write_s: float) -> int:
        """The first kernel that finds a copy complete which starts at kernel ``begin``. Two iterations after
        the first kernel and later is never."""
        sums = self.sums_s[self.hardware.evict_links(tier)[-1]]
        return int(np.searchsorted(sums, sums[begin] + write_s * _EXACT))

    def back_from(self, tier: str, end: int, read_s: float) -> int:
        """The last kernel at which a read can start that kernel ``end`` needs; negative for never."""
        sums = self.sums_s[self.hardware.prefetch_links(tier)[-1]]
        return int(np.searchsorted(sums, sums[end] - read_s * _EXACT, side="right")) - 1

    def is_full(self, tier: str, begin: int, write_s: float, whole: bool = False) -> bool:
        """Whether nothing is left of the links to ``tier`` in any kernel during which a copy from kernel
        ``begin`` on would run, if it ran alone.

        whole   kernels that it would fill to the end count alone: one that fills none finds the links full
        """
        link = self.hardware.evict_links(tier)[-1]
        last = int(np.searchsorted(self.alone_s, self.alone_s[begin] + write_s)) - whole
        within = cyclic.parts(begin, min(max(last, begin), begin + self.kernels), self.kernels)
        return sum(float(self.free_s[link][part].sum()) for part in within) <= 1e-9 * write_s

    def write(self, tier: str, size_bytes: int, begin: int) -> None:
        """Reserve the links to ``tier`` for a copy that starts at kernel ``begin``."""
        *bus, own = self.hardware.evict_links(tier)
        need_s = self.hardware.transfer_s(own, size_bytes)
        sums = self.sums_s[own]
        used = np.diff(np.minimum(np.maximum(sums - sums[begin], 0.0), need_s))
        self._use(own, bus, used, size_bytes, need_s)

    def read(self, tier: str, size_bytes: int, end: int) -> None:
        """Reserve the links back for a read that ends when kernel ``end`` starts, as late as can be."""
        *bus, own = self.hardware.prefetch_links(tier)
        need_s = self.hardware.transfer_s(own, size_bytes)
        sums = self.sums_s[own]
        used = -np.diff(np.minimum(np.maximum(sums[end] - sums, 0.0), need_s))
        self._use(own, bus, used, size_bytes, need_s)

    def _use(self, own: str, bus: list[str], used_s: FloatArray, size_bytes: int, need_s: float) -> None:
        folded = used_s.reshape(2, -1).sum(axis=0)
        for link in (own, *bus):
            share = self.hardware.transfer_s(link, size_bytes) / need_s if need_s > 0 else 0.0
            self.free_s[link] = np.maximum(self.free_s[link] - share * folded, 0.0)
            self.sums_s[link] = cyclic.unrolled(self.free_s[link])
