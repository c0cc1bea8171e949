"""Everything that a replica keeps from step to step, found by going from object to object."""

from __future__ import annotations

import enum
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

TORCHS_OWN = {*vars(torch.nn.Module()), *vars(torch.utils.data.DataLoader([0])), "pin_memory"}
"""Fields that classes of ours have from torch's."""


def found_objects(roots: list[Any]) -> list[Any]:
    """Return all objects of Pipollux's own classes, in the same order on all replicas."""
    found: list[Any] = []
    known: set[int] = set()
    queue = deque(roots)
    while queue:
        value = queue.popleft()
        if _is_ours(value):
            if id(value) in known:
                continue
            known.add(id(value))
            found.append(value)
            queue.extend(x for _, x in fields_of(value))
        elif isinstance(value, Mapping):
            queue.extend(value[key] for key in sorted(value, key=_name))
        elif isinstance(value, (list, tuple, set, deque)):
            queue.extend(value)
        elif callable(value) and _is_ours(getattr(value, "__self__", None)):
            queue.append(value.__self__)
    return found


def fields_of(value: Any) -> list[tuple[str, Any]]:
    """Return the fields of an object by name, in the order of names."""
    slots = [x for kind in type(value).__mro__ for x in getattr(kind, "__slots__", ())]
    own = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    own |= getattr(value, "__dict__", {})
    if isinstance(value, (torch.nn.Module, torch.utils.data.DataLoader)):
        own = {name: x for name, x in own.items() if name not in TORCHS_OWN}
    return sorted(own.items())


def contents(roots: list[Any]) -> dict[str, str]:
    """Return a word for what each field of each object holds, by class, number and field."""
    counts: dict[str, int] = {}
    words: dict[str, str] = {}
    for value in found_objects(roots):
        kind = type(value).__name__
        number = counts[kind] = counts.get(kind, -1) + 1
        for name, field in fields_of(value):
            words[f"{kind}[{number}].{name}"] = " ".join(_words(field))
    return words


def _words(value: Any) -> Iterator[str]:
    if value is None or isinstance(value, (bool, int, float, str, bytes, enum.Enum, Path)):
        yield repr(value)
    elif isinstance(value, torch.Tensor):
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()[:12]}"
    elif isinstance(value, np.ndarray):
        yield repr(value.tolist())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=_name):
            yield f"{_name(key)}:"
            yield from _words(value[key])
    elif isinstance(value, (list, tuple, deque)):
        yield f"{type(value).__name__}({len(value)})"
        for part in value:
            yield from _words(part)
    elif isinstance(value, (set, frozenset)):
        yield f"set({len(value)})"
    elif _is_value(value):
        for field in fields(value):
            yield from _words(getattr(value, field.name))
    else:
        yield f"<{type(value).__name__}>"


def _name(key: object) -> str:
    return getattr(key, "__qualname__", None) or (
        f"<{type(key).__name__}>" if isinstance(key, torch.Tensor) else str(key)
    )


def _is_ours(value: object) -> bool:
    kind = type(value)
    ours = kind.__module__.startswith("pipollux_hybrid.")
    return ours and not isinstance(value, (type, enum.Enum, tuple)) and not _is_value(value)


def _is_value(value: object) -> bool:
    """Return whether it is a value that nobody changes, and no object."""
    return is_dataclass(value) and bool(value.__dataclass_params__.frozen)
