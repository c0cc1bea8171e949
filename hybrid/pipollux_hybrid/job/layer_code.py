"""Digests of the code and settings of layers, compared between replicas.

Shapes of parameters do not distinguish a script from a version with an edited ``forward``. So each
module is described by its plain attributes and a digest of its class's bytecode, without file names
and line numbers. Bytecode is what this process runs, even if the file has changed since.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

PLACE = re.compile(
    r"rank|world|replica|device|host|node|path|file|dir|name|time|seed|main|log|debug|print|verbose"
)
"""Names of attributes that may differ by process or host without changing the computation."""
LONGEST = 100
"""Longest attribute in characters; longer ones are cut and get a digest."""
SETUP = ("__init__", "__repr__", "extra_repr", "__getstate__", "__setstate__", "__del__")
"""Methods that take no part in a forward."""


def layer_settings(module: nn.Module) -> dict[str, object]:
    """Return the settings besides parameters that every replica's layers must have in common: by
    module name, the class with the digest of its code, and the attributes.
    """
    settings: dict[str, object] = {}
    digests: dict[type, str] = {}
    for name, layer in module.named_modules():
        kind = type(layer)
        if kind not in digests:
            digests[kind] = _digest_of_class(kind)
        own = vars(layer).get("forward")
        code = _digest([own]) if isinstance(own, FunctionType) else digests[kind]
        settings[f"code of {kind.__name__} {name!r}"] = code
        for attribute, value in sorted(vars(layer).items()):
            place = PLACE.search(attribute.lower())
            own_switch = isinstance(value, bool) and not _is_library(kind.__module__)
            if attribute in _OF_TORCH or place or own_switch or attribute.startswith(_COMPILER):
                continue  # a script's own switch may be "this replica prints"
            if _is_plain(value):
                settings[f"{attribute} of {kind.__name__} {name!r}"] = _short(repr(value))
    return settings


def _short(text: str) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({digest})"


_OF_TORCH = frozenset(vars(nn.Module()))

_COMPILER = "_torchdynamo_"
"""Prefix of what ``torch.compile`` keeps in a layer, such as an address in this process."""


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float)) or (isinstance(value, str) and "/" not in value)


def _digest_of_class(kind: type) -> str:
    """Return a digest of the code of a class's own methods; empty for torch's classes."""
    functions = [
        function
        for base in kind.__mro__
        if base is not nn.Module and not _is_library(base.__module__)
        for name, member in sorted(vars(base).items())
        if name not in SETUP
        for function in _functions(member)
    ]
    return _digest(functions) if functions else ""


def _functions(member: object) -> Iterator[FunctionType]:
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    if isinstance(member, property):
        yield from (x for x in (member.fget,) if isinstance(x, FunctionType))
    if isinstance(member, FunctionType):
        yield member


def _digest(functions: list[FunctionType]) -> str:
    found = hashlib.blake2b(digest_size=6)
    _add_functions(functions, found.update, set())
    return found.hexdigest()


def _add_functions(
    functions: list[FunctionType], update: Callable[[bytes], None], seen: set[CodeType]
) -> None:
    """Add the code of functions, and of the script's own functions that they call by name."""
    for function in functions:
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        _add_code(function.__code__, update)
        update(repr([x for x in function.__defaults__ or () if _is_plain(x)]).encode())
        called = (function.__globals__.get(name) for name in function.__code__.co_names)
        wrapped = getattr(function, "__wrapped__", None)
        _add_functions(
            [
                x
                for x in (*called, wrapped)
                if isinstance(x, FunctionType) and not _is_library(x.__module__)
            ],
            update,
            seen,
        )


def _add_code(code: CodeType, update: Callable[[bytes], None]) -> None:
    update(code.co_code)
    update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add_code(constant, update)
        else:
            update(_constant(constant).encode())


def _constant(value: Any) -> str:
    """Return a constant as text that is independent of the iteration order of sets."""
    if isinstance(value, frozenset):
        return repr(sorted(map(_constant, value)))
    return f"({','.join(map(_constant, value))})" if isinstance(value, tuple) else repr(value)


def _is_library(module: str | None) -> bool:
    top = (module or "").partition(".")[0]
    return top == "torch" or (top in sys.stdlib_module_names and top != "__main__")
