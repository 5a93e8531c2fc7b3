"""Matches the tensors of a saved state with those of the modules, optimizers and dicts to load it into."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.checkpoint.failures import NAMES_SHOWN, shown
from penstock.checkpoint.tree import below

_NOTHING: Any = object()
_WRAPPER = "module."  # DistributedDataParallel and DataParallel have the model there
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Pair(NamedTuple):
    """A tensor to load into, and the saved tensor. `path` is its place in the state."""

    path: str
    target: torch.Tensor
    saved: torch.Tensor


class Match:
    """A saved state, compared with the tensors, dicts, lists, modules and optimizers to load it into.

    pairs      tensors to load
    problems   differences between the two, a text for each kind; empty where they match
    """

    def __init__(self, saved: Any, into: Any) -> None:
        self.pairs: list[Pair] = []
        self._missing: list[tuple[str, Any]] = []
        self._spare: list[str] = []  # names in the file that nothing here has
        self._unexpected: list[str] = []
        self._different: list[str] = []
        self._states: dict[int, Any] = {}  # of modules and optimizers
        if _kind(saved) != _kind(into):
            self._different.append(f"the file holds {_kind(saved)}, not {_kind(into)}")
        else:
            self._compare("", saved, into)

    @property
    def problems(self) -> list[str]:
        kinds = {
            "missing in the file": self._missing_names(),
            "not expected": self._unexpected,
            "different": self._different,
        }
        return [f"{kind}: {shown(names)}" for kind, names in kinds.items() if names]

    def take_over(self, saved: Any, into: Any) -> Any:
        """``into``, with all saved values that are not tensors: in place where possible."""
        if saved is _NOTHING or isinstance(into, torch.Tensor):
            return into
        if isinstance(into, torch.nn.Module | torch.optim.Optimizer):
            if not all(
                isinstance(value, torch.Tensor) for value in saved.values()
            ):  # of a module, extra state
                state = self._states[id(into)]
                into.load_state_dict(self.take_over(_match_wrapper_prefix(saved, state), state))
            return into
        if isinstance(into, dict) and isinstance(saved, Mapping):
            for key, value in saved.items():
                into[key] = self.take_over(value, into.get(key, _NOTHING))
            return into
        if isinstance(into, list | tuple) and type(into) is type(saved) and len(into) == len(saved):
            values = [self.take_over(theirs, ours) for theirs, ours in zip(saved, into, strict=True)]
            if isinstance(into, tuple):
                return type(into)(values)
            into[:] = values
            return into
        return saved.copy() if isinstance(saved, np.ndarray) else saved

    def _compare(self, path: str, saved: Any, into: Any, tensors_only: bool = False) -> None:
        """``tensors_only``: other values can be missing in the file, such as a later optimizer's settings."""
        if isinstance(into, torch.nn.Module | torch.optim.Optimizer):
            state = self._states[id(into)] = into.state_dict()
            if tensors_only := isinstance(into, torch.optim.Optimizer):
                self._prepare_optimizer(path, saved, state)
            saved, into = _match_wrapper_prefix(saved, state), state
        if isinstance(into, torch.Tensor) and isinstance(saved, torch.Tensor):
            if difference := _difference(saved, into):
                self._different.append(f"{path or 'the tensor'} ({difference})")
            else:
                self.pairs.append(Pair(path, into, saved))
        elif isinstance(into, Mapping) and isinstance(saved, Mapping):
            for key in {**saved, **into}:
                both = saved.get(key, _NOTHING), into.get(key, _NOTHING)
                self._compare(below(path, key), *both, tensors_only)
        elif isinstance(into, list | tuple) and isinstance(saved, list | tuple):
            for index, both in enumerate(zip_longest(saved, into, fillvalue=_NOTHING)):
                self._compare(below(path, index), *both, tensors_only)
        else:
            missing = list(named_tensors(into, path))
            if saved is _NOTHING and not missing and not tensors_only:
                missing = [(path, into)]
            unexpected = [name or "the tensor" for name, _ in named_tensors(saved, path)]
            self._missing += missing
            self._unexpected += unexpected
            self._spare += [path, *unexpected] if into is _NOTHING else []

    def _missing_names(self) -> list[str]:
        """But those of tied tensors, which other writers of safetensors files save under one name."""
        filled = [pair.target for pair in self.pairs]
        names = [
            name or "the tensor"
            for name, value in self._missing
            if type(value) not in _PLAIN or not any(map(value.is_set_to, filled))
        ]
        for index, name in enumerate(names[:NAMES_SHOWN]):
            if near := difflib.get_close_matches(name, self._spare, n=1):
                names[index] = f"{name} (did you mean {near[0]}?)"
        return names

    def _prepare_optimizer(self, path: str, saved: Any, state: dict[str, Any]) -> None:
        """Make new tensors in an optimizer's state where it has none yet."""
        expected = [len(group["params"]) for group in state["param_groups"]]
        groups = _member(saved, "param_groups")
        params = [_member(group, "params") for group in groups] if isinstance(groups, list) else None
        found = params and [len(each) if isinstance(each, list) else None for each in params]
        if found != expected:
            self._different.append(f"{below(path, 'param_groups')} (of {found} parameters, not {expected})")
        elif not state["state"]:
            state["state"] = _new_tensors_like(_member(saved, "state"))


def _match_wrapper_prefix(saved: Any, state: Mapping[str, Any]) -> Any:
    """A module's saved state with the names of ``state``: adds or removes the prefix "module." where only one
    of the two was in DistributedDataParallel or DataParallel."""
    if not isinstance(saved, Mapping) or saved.keys() == state.keys():
        return saved
    if saved.keys() == {_WRAPPER + key for key in state}:
        return {key: saved[_WRAPPER + key] for key in state}
    if state.keys() == {f"{_WRAPPER}{key}" for key in saved}:
        return {f"{_WRAPPER}{key}": value for key, value in saved.items()}
    return saved


def _difference(saved: torch.Tensor, target: torch.Tensor) -> str | None:
    """Why ``saved`` cannot be loaded into ``target``; None where it can."""
    if type(target).__name__ == "DTensor":
        return "a DTensor, whose parts lie in several processes: see penstock.checkpoint.dcp.Reader"
    if type(target) not in _PLAIN or target.layout != torch.strided or target.is_quantized:
        return f"a {type(target).__name__} of layout {target.layout} cannot be filled in place"
    if target.is_meta:
        return "on the meta device: give it memory first, with to_empty(device=...)"
    if (saved.shape, saved.dtype) != (target.shape, target.dtype):
        return f"{_described(saved)} in the file, {_described(target)} here"
    if any(stride == 0 and size > 1 for size, stride in zip(target.shape, target.stride(), strict=True)):
        return "expanded: its elements share memory"
    return None


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _new_tensors_like(saved: Any) -> Any:
    """``saved`` with new tensors in place of its own.

    No operator may see a tensor of the file: an open run would count its mapped memory, and cannot evict it.
    """
    if isinstance(saved, torch.Tensor):
        alike = torch.empty_strided(saved.shape, saved.stride(), dtype=saved.dtype, device="meta")
        return torch.empty_like(alike, device=saved.device)
    if isinstance(saved, dict):
        return {key: _new_tensors_like(value) for key, value in saved.items()}
    if isinstance(saved, list | tuple) and not isinstance(saved, torch.Size):
        return type(saved)(_new_tensors_like(value) for value in saved)
    return saved


def named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a state with their places in it, dotted; of one that is a tensor, the path is empty."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping | list | tuple):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from named_tensors(inner, below(path, key))
    elif isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        yield from named_tensors(value.state_dict(), path)


def _kind(value: Any) -> str:
    """The kind of the outermost value: the file's and the user's must be equal."""
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, Mapping | torch.nn.Module | torch.optim.Optimizer):
        return "a dict"
    return "a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}"


def _member(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None
