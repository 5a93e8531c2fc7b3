"""How a store is mounted."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import InvalidArgument
from penstock.samples.order import ORDERS


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a store is mounted; see `penstock.samples.mount`."""

    order: str
    cache_bytes: int
    rank: int
    world: int
    io: str
    verify: bool
    on_damage: str
    prefetch_bytes: int
    timeout_s: float
    copy_threads: int | None

    def __post_init__(self) -> None:
        for name, choices in (
            ("order", ORDERS),
            ("io", ("auto", "buffered", "direct")),
            ("on_damage", ("raise", "skip")),
        ):
            if (value := getattr(self, name)) not in choices:
                raise InvalidArgument(f"{name}={value!r} is none of {', '.join(map(repr, choices))}")
        if not 0 <= self.rank < self.world:
            raise InvalidArgument(
                f"rank={self.rank} is not among world={self.world} processes: give 0 to world - 1"
            )
        if not self.timeout_s > 0:
            raise InvalidArgument(f"timeout_s={self.timeout_s} must be more than 0")
        if self.copy_threads is not None and self.copy_threads < 0:
            raise InvalidArgument(f"copy_threads={self.copy_threads} must be 0 or more")
