"""The names of parameters that several layers share, where each stage has a process of its own.

The plain module has one parameter under several names, of which it saves and loads all. A process
knows its copy by the names of its own layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .parameter_groups import plain_name

__all__ = ["with_last_values"]


def with_last_values(
    state_dict: Mapping[str, Any], shared: Iterable[Sequence[str]], *, strict: bool
) -> dict[str, Any]:
    """Give all names of a parameter the value that the plain module would end up with.

    That loads one name after another into the same memory, so the last one holds.

    Args:
        state_dict: What is loaded; names may have the traces of ``torch.compile``.
        shared: For each shared parameter its names, in the module's order.
        strict: Whether missing names stay missing, to be complained of.

    Example:
        >>> with_last_values({"0.w": 1, "2.w": 3}, [("0.w", "2.w", "4.w")], strict=False)
        {'0.w': 3, '2.w': 3, '4.w': 3}
    """
    loaded, given = dict(state_dict), {plain_name(name): name for name in state_dict}
    for names in shared:
        plain = [plain_name(name) for name in names]
        present = [given[name] for name in plain if name in given]
        if present:
            value = state_dict[present[-1]]
            chosen = [name for name in plain if name in given or not strict]
            loaded |= {given.get(name, name): value for name in chosen}
    return loaded
