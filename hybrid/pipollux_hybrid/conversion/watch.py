"""Watches settings of the modules around blocks, whose code no longer runs.

Layers have recorded their effect, so a setting that a script changes later would have none.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from pipollux_hybrid.errors import ConfigurationError

IGNORED = frozenset(("training", "use_cache", "return_dict", "gradient_checkpointing"))
"""Settings without effect on recorded layers."""


class SettingsWatch:
    """Settings of a model's opened modules, and of their configurations, at conversion."""

    def __init__(self, opened: Mapping[str, nn.Module]) -> None:
        self._opened = {name: weakref.ref(module) for name, module in opened.items()}
        self._before = {name: _settings(module) for name, module in opened.items()}

    def __deepcopy__(self, _: Any) -> SettingsWatch:
        """Copies of a layer watch the same model."""
        return self

    def check(self, *, training: bool) -> None:
        """Compare with the current settings of a model that the script still holds.

        Raises:
            ConfigurationError: One has changed, or the model is in another mode than its layers.
        """
        for name, reference in self._opened.items():
            module = reference()
            if module is None:
                continue
            found, before = _settings(module), self._before[name]
            if found != before:
                changed = next(x for x in found | before if found.get(x) != before.get(x))
                raise ConfigurationError(
                    f"{changed} of {_shown(name, module)} is {found.get(changed)!r} and was "
                    f"{before.get(changed)!r} when the model was converted into layers, which "
                    "would not follow: set it before"
                )
            if module.training != training:
                mode, call = ("training", "train()") if training else ("evaluation", "eval()")
                raise ConfigurationError(
                    f"{_shown(name, module)} is in another mode than its layers, which are in "
                    f"{mode} mode: call {call} of the wrapped model, which sets both"
                )

    def set_mode(self, training: bool) -> None:
        """Set the mode of the opened modules, which are in no layer."""
        for reference in self._opened.values():
            module = reference()
            if module is not None:
                module.training = training


def _settings(module: nn.Module) -> dict[str, Any]:
    config = getattr(module, "config", None)
    found = _plain(vars(module).items())
    if hasattr(config, "to_dict"):
        found |= {f"config.{name}": x for name, x in _plain(vars(config).items()).items()}
    return found


def _plain(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {
        name: value
        for name, value in items
        if isinstance(value, (bool, int, float, str, type(None)))
        and name[0] != "_"
        and name not in IGNORED
    }


def _shown(name: str, module: nn.Module) -> str:
    return f"module {name!r}" if name else f"the {type(module).__name__}"
