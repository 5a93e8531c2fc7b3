"""Python's layer over the arena, loaded anew from its source: as it is, or with a piece of it replaced."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import penstock.runtime
from penstock import _native
from penstock.runtime import offload_mode  # noqa: F401  what it imports is imported once
from penstock.runtime.devices import cpu  # noqa: F401

RUNTIME = Path(penstock.runtime.__file__).parent
FILES = {
    "arena": ("penstock.runtime.arena", RUNTIME / "arena.py"),
    "copy_engine": ("penstock.runtime.copy_engine", RUNTIME / "copy_engine.py"),
    "cpu": ("penstock.runtime.devices.cpu", RUNTIME / "devices" / "cpu.py"),
    "recompute": ("penstock.runtime.recompute", RUNTIME / "recompute.py"),
}


class Native:
    """penstock._native, whose calls on the arena are seen: `arena` is called with each one that is made."""

    def __init__(self) -> None:
        self.world: Any = None

    def __getattr__(self, name: str) -> Any:
        value = getattr(_native, name)
        if name.startswith("arena_") and name not in ("arena_stats", "arena_block"):
            call = value

            def value(*args: Any, **kwargs: Any) -> Any:
                return self.world.native(name, call, args, kwargs)

        setattr(self, name, value)
        return value


def source_of(name: str, replaced: tuple[tuple[str, str], ...] = ()) -> str:
    """Of a file by its name above. Raises ValueError where it has not each piece once."""
    source = FILES[name][1].read_text()
    for old, new in replaced:
        if source.count(old) != 1:
            raise ValueError(f"{name} has {source.count(old)} times, not once:\n{old}")
        source = source.replace(old, new)
    return source


class Layer:
    """The modules. `replaced`: of a file by its name above, pieces of its text, and what they become."""

    def __init__(self, file: str | None = None, replaced: tuple[tuple[str, str], ...] = ()) -> None:
        self.native = Native()
        modules = {name: self._load(name, replaced if name == file else ()) for name in FILES}
        self.arena, self.copy_engine, self.cpu, self.recompute = (modules[name] for name in FILES)
        self.cpu.arena = self.arena
        for module in (self.cpu, self.recompute):
            module._native = self.native
        self.cpu.gc = SimpleNamespace(collect=lambda: 0)  # the world leaves no garbage that matters
        self.recompute.start_serving = lambda recomputation: None  # the world answers
        self.recompute.stop_serving = lambda recomputation: None

    @staticmethod
    def _load(name: str, replaced: tuple[tuple[str, str], ...]) -> ModuleType:
        full_name, path = FILES[name]
        source = source_of(name, replaced)
        spec = importlib.util.spec_from_file_location(full_name, path)
        assert spec is not None and full_name in sys.modules
        module = importlib.util.module_from_spec(spec)
        exec(compile(source, str(path), "exec"), module.__dict__)
        return module
