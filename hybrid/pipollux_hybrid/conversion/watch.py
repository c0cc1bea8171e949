"""Watches settings of the modules around blocks, whose code no longer runs.

Layers have recorded their effect, so a setting that a script changes later would have none.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from pipollux_hybrid.errors import ConfigurationError

from .recorder import own_attributes

IGNORED = frozenset(
    (
        *("use_cache", "return_dict", "gradient_checkpointing", "dtype", "generation_config"),
        *("transformers_version", "architectures", "id2label", "label2id", "warnings_issued"),
        *("_compiled_call", "_compiled_call_impl", "_last_compile_config"),
        "_adapters_disabled",  # PEFT's note of what the adapters in blocks do
    )
)
"""Settings without effect on recorded layers; ``save_pretrained`` and ``generate`` set some."""
PLAIN = (bool, int, float, str, type(None), np.generic, torch.dtype, torch.device)
CONTAINERS = (list, tuple, set, frozenset, dict)
MISSING = object()
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class SettingsWatch:
    """Settings of a model's opened modules, and of their configurations, at conversion."""

    def __init__(self, opened: Mapping[str, nn.Module]) -> None:
        self._opened = {name: weakref.ref(module) for name, module in opened.items()}
        self._before = {name: settings_of(module) for name, module in opened.items()}
        self._members = {name: members_of(module) for name, module in opened.items()}
        self._parts = list(_parts(opened.values()))

    def __deepcopy__(self, _: Any) -> SettingsWatch:
        """Copies of layers have settings of their own, and watch nothing."""
        return SettingsWatch({})

    def check(self, *, training: bool) -> None:
        """Compare with the current settings of a model that the script still holds.

        Raises:
            ConfigurationError: One has changed, or the model is in another mode than its layers.
        """
        if not all(part.is_unchanged() for part in self._parts):
            self._compare()
            modules = (reference() for reference in self._opened.values())
            self._parts = list(_parts(x for x in modules if x is not None))
        for name, reference in self._opened.items():
            module = reference()
            if module is not None and module.training != training:
                mode, call = ("training", "train()") if training else ("evaluation", "eval()")
                raise ConfigurationError(
                    f"{_shown(name, module)} is in another mode than its layers, which are in "
                    f"{mode} mode: call {call} of the wrapped model, which sets both"
                )

    def _compare(self) -> None:
        for name, reference in self._opened.items():
            module = reference()
            if module is None:
                continue
            found, before = settings_of(module), self._before[name]
            for setting in before | found:
                value, old = found.get(setting, MISSING), before.get(setting, MISSING)
                if value != old:
                    raise ConfigurationError(
                        f"{setting} of {_shown(name, module)} is {_text(value)} and was "
                        f"{_text(old)} when the model was converted into layers, which would not "
                        "follow: set it before"
                    )
            self._compare_members(name, module)
            if has_hooks(module):
                raise ConfigurationError(
                    f"a hook was registered on {_shown(name, module)}, which is never called, as "
                    "layers repeat only its operations: register it on a block or on a module "
                    "between blocks"
                )

    def _compare_members(self, name: str, module: nn.Module) -> None:
        found, before = members_of(module), self._members[name]
        for member in before | found:
            if (
                member not in found
                or member not in before
                or found[member]() is not before[member]()
            ):
                was = "added to" if member not in before else "replaced in"
                was = "deleted from" if member not in found else was
                raise ConfigurationError(
                    f"{member!r} was {was} {_shown(name, module)} after the model was converted "
                    "into layers, which would not follow: change the model before"
                )

    def has_attribute(self, name: str) -> bool:
        """Return whether the model has an attribute, if the script still holds it."""
        model = self._opened[""]() if "" in self._opened else None
        return model is not None and hasattr(model, name)

    def set_mode(self, training: bool) -> None:
        """Set the mode of the opened modules, which are in no layer."""
        for reference in self._opened.values():
            module = reference()
            if module is not None:
                module.training = training


class _Part:
    """The settings of one object, compared without reading those that are the same objects."""

    def __init__(self, module: nn.Module, owner: Any) -> None:
        self._module = weakref.ref(module)
        self._owner = _reference(owner)
        self._names = frozenset(vars(owner))
        own = _own(owner).items()
        watched = {name: x for name, x in own if _is_watched(name, x)}
        self._members = members_of(owner)
        self._watched = tuple(watched)
        self._values = tuple(watched.values())
        self._objects = {name: x for name, x in own if _has_settings(name, x)}
        self._contents = [
            (x, copy.deepcopy(x)) for x in watched.values() if isinstance(x, CONTAINERS)
        ]

    def is_unchanged(self) -> bool:
        """Return whether all settings are as they were, or nothing holds the model any more."""
        owner = self._owner()
        if owner is None or self._module() is None:
            return True
        found = vars(owner)
        return (
            found.keys() == self._names
            and tuple(map(found.get, self._watched)) == self._values
            and all(found[name] is x for name, x in self._objects.items())
            and all(x == before for x, before in self._contents)
            and _has_members(owner, self._members)
            and not has_hooks(owner)
        )


def _parts(modules: Any) -> Iterator[_Part]:
    """Yield the modules and their configurations; those that modules share are read once."""
    known = set()
    for module in modules:
        yield _Part(module, module)
        objects = (x for name, x in _own(module).items() if _has_settings(name, x))
        for config in (*configs_of(module), *objects):
            if id(config) not in known:
                known.add(id(config))
                yield _Part(module, config)


def configs_of(owner: Any) -> Iterator[Any]:
    """Yield the configuration of a module, and the configurations in it."""
    pending = [getattr(owner, "config", None)]
    known = set()
    while pending:
        config = pending.pop()
        if _is_config(config) and id(config) not in known:
            known.add(id(config))
            yield config
            pending += vars(config).values()


Members: TypeAlias = dict[str, Callable[[], Any]]
"""Weak references to modules, tensors and functions, by name."""


def members_of(owner: Any) -> Members:
    """Return the modules, tensors and functions that a module has itself."""
    attached = {
        name: x
        for name, x in vars(owner).items()
        if (isinstance(x, Tensor) or callable(x)) and name not in IGNORED
    }
    both = {**_registered(owner), **attached} if isinstance(owner, nn.Module) else {}
    return {name: _reference(x) for name, x in both.items()}


def _registered(module: nn.Module) -> dict[str, Any]:
    own = (*module._modules.items(), *module._parameters.items(), *module._buffers.items())
    return {name: x for name, x in own if x is not None}


def _has_members(owner: Any, members: Members) -> bool:
    """Return whether a module has these, and no other registered ones."""
    if not isinstance(owner, nn.Module):
        return True
    registered = _registered(owner)
    found = {**vars(owner), **registered}
    return registered.keys() <= members.keys() and all(
        name in found and found[name] is reference() for name, reference in members.items()
    )


def _reference(value: Any) -> Callable[[], Any]:
    """Return a weak reference, unless its class has none, as that of small objects of Python."""
    return weakref.ref(value) if type(value).__weakrefoffset__ else lambda: value


def has_hooks(owner: Any) -> bool:
    """Return whether a module has hooks of its forward or backward."""
    found = vars(owner)
    return any(found.get(kind) for kind in HOOKS)


def settings_of(module: nn.Module) -> dict[str, Any]:
    """Return the settings of a module and of its configurations, by name."""
    found = _plain(module, "")
    for name, value in _own(module).items():
        if _has_settings(name, value) and not _is_config(value):
            found |= _plain(value, f"{name}.")
    config = getattr(module, "config", None)
    return {**found, **_of_config(config, "config.", ())} if _is_config(config) else found


def _of_config(config: Any, prefix: str, around: tuple[Any, ...]) -> dict[str, Any]:
    found = _plain(config, prefix)
    for name, value in vars(config).items():
        if _is_config(value) and not any(value is x for x in (config, *around)):
            found |= _of_config(value, f"{prefix}{name}.", (config, *around))
    return found


def _plain(owner: Any, prefix: str) -> dict[str, Any]:
    return {
        prefix + name: copy.deepcopy(value)
        for name, value in _own(owner).items()
        if _is_watched(name, value)
    }


def _own(owner: Any) -> dict[str, Any]:
    return own_attributes(owner) if isinstance(owner, nn.Module) else vars(owner)


def _is_watched(name: str, value: Any) -> bool:
    return name not in IGNORED and _is_plain(value)


def _has_settings(name: str, value: Any) -> bool:
    """Return whether a value may have settings of its own, such as a schedule that code reads."""
    others = (type, nn.Module, Tensor, ModuleType, *PLAIN)
    return name not in IGNORED and hasattr(value, "__dict__") and not isinstance(value, others)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number or text, or a container of such."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.keys())) and all(map(_is_plain, value.values()))
    if isinstance(value, CONTAINERS):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def _is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "__dict__") and not isinstance(value, type)


def _text(value: Any) -> str:
    return "missing" if value is MISSING else repr(value)


def _shown(name: str, module: nn.Module) -> str:
    return f"module {name!r}" if name else f"the {type(module).__name__}"
