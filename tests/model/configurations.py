"""What is explored: worlds that each have few actions, so that every interleaving of any length is."""

from __future__ import annotations

from tests.model.engine_world import PAGE, SIZE, Config, each

BOTH_AT_ONCE = 2 * SIZE  # bytes in flight

CONFIGURATIONS: dict[str, Config] = {
    # Copies by order, and what overtakes them.
    "copies": Config(each("evict", "release", "prefetch", "read", "write")),
    "copies at once": Config(each("release", "fetch", "write"), in_flight_bytes=BOTH_AT_ONCE),
    # Another thread reads and writes memory meanwhile.
    "touched": Config(each("release", "prefetch"), each("look", "scribble")),
    "touched at once": Config(
        each("release", "prefetch", "read"), each("look"), in_flight_bytes=BOTH_AT_ONCE
    ),
    # Foreign memory makes the arena evict by itself.
    "taken": Config(each("release", "prefetch", "write"), foreign_bytes=2 * SIZE),
    "taken, touched": Config(each("release", "prefetch"), each("scribble"), foreign_bytes=3 * SIZE),
    "taken amid": Config((*each("release", "prefetch"), "pair"), foreign_bytes=2 * SIZE, inside=1),
    # Packed copies.
    "packed": Config(each("pack", "prefetch", "write")),
    "packed, touched": Config(each("pack", "prefetch"), each("scribble")),
    "packed, taken": Config(each("pack", "prefetch"), foreign_bytes=3 * SIZE, in_flight_bytes=PAGE),
    "stashed, taken": Config((*each("stash", "read"), "release A", "prefetch A"), foreign_bytes=3 * SIZE),
    # B is computed from A, dropped, and computed again.
    "recomputed": Config(("both", "drop B", "write A", "read B", "release A"), ("look B", "scribble A")),
    "recomputed, taken": Config(("both", "drop B", "read B", "release A"), foreign_bytes=2 * SIZE),
    # One transfer fails; the disk has no room for both; storages die.
    "failing": Config(each("release", "prefetch", "read"), each("scribble"), errors=1),
    "full": Config(("evict A", "read B", "release B"), ("look A",), 2 * SIZE, extents=1),
    "dying": Config(each("release", "prefetch", "make"), each("die")),
    "dying, packed": Config(each("pack", "read", "make"), each("die"), in_flight_bytes=BOTH_AT_ONCE),
    # A thread of a collective has a storage that the program ends.
    "kept": Config(each("release", "prefetch", "make"), each("keep", "let", "die")),
    "kept, taken": Config(each("release"), each("keep", "let", "die"), foreign_bytes=2 * SIZE),
    # The program gives a storage other memory.
    "shared": Config(each("release", "prefetch", "read"), each("share")),
    "shared, taken": Config(each("release"), each("share"), SIZE),
    "shared, packed": Config(each("pack", "prefetch"), each("share")),
}
