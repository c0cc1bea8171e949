"""Names of parameters shared by several layers in a multi-process pipeline.

The plain module saves and loads such a parameter under all of its names; a process names its copy
after its own layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .parameter_groups import plain_name

__all__ = ["with_last_values"]


def with_last_values(
    state_dict: Mapping[str, Any], shared: Iterable[Sequence[str]], *, strict: bool
) -> dict[str, Any]:
    """Set all names of a shared parameter to the value that the plain module would have.

    It loads one name after another into the same memory, so the last one wins. ``strict``: missing
    names stay missing, so that loading refuses them.

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
