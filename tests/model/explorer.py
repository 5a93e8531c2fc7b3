"""A search through every run of a program that asks what happens next.

The program asks `Run.pick` wherever several things may happen. It is run once for each choice, from the
beginning, breadth first: what is found is found by a short run. A state that was met is left alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

MOST_TRIES = 5


class Violation(BaseException):
    """What must hold does not. No Exception: the code under test must not swallow it."""


class Diverged(BaseException):
    """The same choices lead somewhere else this time: the code under test looks at a clock."""


@dataclass(slots=True, eq=False)
class Node:
    """A state, by the choices that lead there, and what may happen next and was not tried yet."""

    digest: bytes
    path: tuple[str, ...]
    left: list[str]


class Run:
    """One run: along a path, and one state beyond.

    over    the end of the path is reached, and the program should end
    known   the state there was met before
    """

    def __init__(self, search: Search, path: Sequence[str], node: Node | None = None) -> None:
        self.search, self.node = search, node
        self.choices = list(path)
        self.position = 0
        self.over = self.known = False

    def pick(self, options: Sequence[str], state: Callable[[], Hashable]) -> str | None:
        """What happens next, of `options`; None from the end of the path on, of which `state` is noted.

        state   all that what follows depends on
        """
        if self.over:
            return None
        if self.position == len(self.choices):
            digest = blake2b(repr(state()).encode(), digest_size=12).digest()
            if self.node is None or digest != self.node.digest or not self.node.left:
                self.over = True
                self.known = self.search.knows(digest, self.choices, options)
                return None
            self.choices.append(self.node.left.pop())  # nothing has changed: it might as well be tried now
        choice = self.choices[self.position]
        self.position += 1
        if choice not in options:
            raise Diverged(f"{choice} is none of {', '.join(options)}")
        return choice


@dataclass
class Search:
    """Runs `program` along every path, as far as the bounds allow.

    most_states, most_s   bounds; None: there is none
    states, runs, depth   so far: distinct states, runs, and choices of the longest one
    diverged              paths that did not lead where they led before, however often they were tried
    closed                there is no other state
    violation, path       the first one that was found, and what led there
    """

    program: Callable[[Run], None]
    most_states: int | None = None
    most_s: float | None = None
    states: int = 0
    runs: int = 0
    depth: int = 0
    diverged: int = 0
    closed: bool = False
    violation: Violation | None = None
    path: list[str] = field(default_factory=list)

    _seen: set[bytes] = field(default_factory=set)
    _next: deque[Node] = field(default_factory=deque)

    def explore(self) -> Search:
        ends_s = time.monotonic() + self.most_s if self.most_s is not None else None
        if not self._run([]):
            return self
        while self._next:
            node = self._next.popleft()
            while node.left:
                if self.most_states is not None and self.states >= self.most_states:
                    return self
                if ends_s is not None and time.monotonic() > ends_s:
                    return self
                if not self._run([*node.path, node.left.pop()], node):
                    return self
        self.closed = True
        return self

    def follow(self, path: Sequence[str]) -> Search:
        """One run along a path."""
        self._run(list(path))
        return self

    def _run(self, path: list[str], node: Node | None = None) -> bool:
        for _ in range(MOST_TRIES):
            self.runs += 1
            self.depth = max(self.depth, len(path))
            run = Run(self, path, node)
            try:
                self.program(run)
            except Diverged:
                continue
            except Violation as violation:
                self.violation, self.path = violation, run.choices
                self._shorten()
                return False
            return True
        self.diverged += 1
        return True

    def _shorten(self) -> None:
        """Leave out what the violation does not need."""
        at = 0
        while at < len(self.path):
            shorter = self.path[:at] + self.path[at + 1 :]
            try:
                self.program(Run(Search(self.program), shorter))
            except Diverged:
                pass
            except Violation as violation:
                if str(violation) == str(self.violation):
                    self.path = shorter
                    continue
            at += 1

    def knows(self, digest: bytes, path: Sequence[str], options: Sequence[str]) -> bool:
        """Whether the state was met; what can happen in it is tried later."""
        if digest in self._seen:
            return True
        self._seen.add(digest)
        self.states += 1
        self._next.append(Node(digest, tuple(path), list(reversed(options))))
        return False

    def __str__(self) -> str:
        bound = "all there are" if self.closed else "bound hit"
        text = f"{self.states} states, {self.runs} interleavings of up to {self.depth} choices, {bound}"
        if self.diverged:
            text += f", {self.diverged} that cannot be repeated"
        return text if self.violation is None else f"{text}\n{self.violation}, after {'; '.join(self.path)}"
