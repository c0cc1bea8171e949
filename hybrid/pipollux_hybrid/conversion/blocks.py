"""Choice of a model's blocks: the modules before which it is cut.

Blocks are the members of the outermost lists of modules of one class, such as the layers of a
transformer or the residual blocks of a ResNet. A model without such a list is cut between the
members of its longest ``nn.Sequential`` or ``nn.ModuleList``, or else between its children.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import nn

from pipollux_hybrid.errors import ConfigurationError


def choose_blocks(
    model: nn.Module, calls: Mapping[str, int], cut_at: Sequence[str] | None
) -> list[str]:
    """Return the names of a model's blocks, in the order of its modules.

    Args:
        model: The model.
        calls: How often its forward called each module.
        cut_at: The user's choice: names of modules, or of lists for all of their members.

    Raises:
        ConfigurationError: A name of ``cut_at`` is unknown, or its module is never called.
    """
    if cut_at is not None:
        return _given(model, calls, cut_at)
    lists = [(name, x) for name, x in model.named_modules() if _is_list(x)]
    uniform = [name for name, x in lists if _is_uniform(x)]
    chosen = _members(model, _outermost(uniform), calls)
    if len(chosen) >= 2:
        return chosen
    longest = max(lists, key=lambda item: len(_members(model, [item[0]], calls)), default=None)
    if longest is not None and len(_members(model, [longest[0]], calls)) >= 2:
        return _members(model, [longest[0]], calls)
    return [name for name, _ in model.named_children() if calls.get(name)]


def opened_by(model: nn.Module, blocks: Collection[str]) -> dict[str, nn.Module]:
    """Return the modules around blocks, whose forwards are recorded, by name."""
    around = {""}
    for name in blocks:
        parts = name.split(".")
        around |= {".".join(parts[:count]) for count in range(1, len(parts))}
    return {name: model.get_submodule(name) for name in sorted(around)}


def _given(model: nn.Module, calls: Mapping[str, int], cut_at: Sequence[str]) -> list[str]:
    modules = dict(model.named_modules())
    chosen = []
    for name in cut_at:
        if name not in modules or not name:
            known = ", ".join(repr(x) for x in modules if x)
            raise ConfigurationError(f"cut_at: the model has no module {name!r}; it has {known}")
        members = _members(model, [name], calls) if _is_list(modules[name]) else []
        chosen += members or [name]
    for name in chosen:
        if not calls.get(name):
            raise ConfigurationError(
                f"cut_at: the model's forward does not call module {name!r} on the example inputs, "
                "and a cut is a call: name a module that it calls"
            )
        inside = next((x for x in chosen if x.startswith(f"{name}.")), None)
        if inside is not None:
            raise ConfigurationError(f"cut_at: {inside!r} is in {name!r}: name one of them")
    order = list(modules)
    return sorted(dict.fromkeys(chosen), key=order.index)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 0


def _is_uniform(module: nn.Module) -> bool:
    """Return whether the members have a class in common besides torch's own containers."""
    members = list(module.children())
    common = set(type(members[0]).__mro__).intersection(*(type(x).__mro__ for x in members[1:]))
    return len(members) >= 2 and bool(common - _GENERAL) and not common & _TINY


_GENERAL = {object, *nn.Module.__mro__}
_TINY = {nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.modules.dropout._DropoutNd}
"""Classes too small to be blocks."""


def _outermost(names: Iterable[str]) -> list[str]:
    kept: list[str] = []
    for name in names:
        if not any(name.startswith(f"{x}.") for x in kept):
            kept.append(name)
    return kept


def _members(model: nn.Module, names: Iterable[str], calls: Mapping[str, int]) -> list[str]:
    return [
        f"{name}.{child}".lstrip(".")
        for name in names
        for child, _ in model.get_submodule(name).named_children()
        if calls.get(f"{name}.{child}".lstrip("."))
    ]
