"""Lookup of named tuple classes by name, for messages between stages in several processes.

All processes of a replica run the same script, so module and name identify a class.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Iterator

from torch.utils import _pytree as pytree

from pipollux_hybrid.errors import ConfigurationError

from .microbatch import Structure

__all__ = ["names_of", "register"]


def names_of(structure: Structure, what: str) -> list[str]:
    """Return the names of a structure's named tuples, to serialize it; a ConfigurationError if a
    class cannot be found by its name.
    """
    names = []
    for kind in dict.fromkeys(_classes(structure)):
        name = f"{kind.__module__}:{kind.__qualname__}"
        if _find(name) is not kind:
            raise ConfigurationError(
                f"{what} holds a {kind.__qualname__}, which is not defined at the top of a module: "
                "the process of the next stage finds the class of a named tuple by its name; "
                "define it outside of functions"
            )
        register([name])
        names.append(name)
    return names


def register(names: Iterable[str]) -> None:
    """Register these named tuples for serialization of structures."""
    for name in names:
        kind = _find(name)
        if kind is not None and kind not in pytree.SUPPORTED_SERIALIZED_TYPES:
            pytree._register_namedtuple(kind, serialized_type_name=name)


def _classes(structure: Structure) -> Iterator[type]:
    if structure.type is not None and pytree.is_namedtuple_class(structure.type):
        yield structure.type
    elif isinstance(structure.context, type) and pytree.is_namedtuple_class(structure.context):
        yield structure.context
    for child in structure.children():
        yield from _classes(child)


def _find(name: str) -> type | None:
    module, _, path = name.partition(":")
    try:
        found = operator.attrgetter(path)(sys.modules[module])
    except (KeyError, AttributeError):
        return None
    return found if isinstance(found, type) else None
