"""Interception of what a model calls without torch's own hook: modules, autograd, mask functions.

`TorchFunctionMode` sees the functions of torch. Everything here is replaced for the time of a
recording only, and passes the calls of paused listeners on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

call_module = nn.Module.__call__
"""The call of a module, whether or not it is intercepted."""


class Listener(Protocol):
    """What intercepted calls are passed to."""

    @property
    def pauses(self) -> bool:
        """Whether calls are to be made as they are."""

    def module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module, also while it pauses."""

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function."""


@contextmanager
def intercepted(listener: Listener, opened: Iterable[nn.Module]) -> Iterator[None]:
    """Pass calls to the listener: of all modules, and of functions that `opened` ones call."""
    with _modules(listener), _functions(listener, opened), _autograd(listener):
        yield


@contextmanager
def _modules(listener: Listener) -> Iterator[None]:
    """Pass calls of all modules to the listener."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return listener.module(module, args, kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]  # for the time of the recording
    try:
        yield
    finally:
        nn.Module.__call__ = call_module  # type: ignore[method-assign]  # as it was


@contextmanager
def _autograd(listener: Listener) -> Iterator[None]:
    """Record custom autograd functions as calls."""
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if listener.pauses:
            return original.__get__(None, cls)(*args, **kwargs)
        return listener.call(AutogradFunction(cls), args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]  # as above
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]  # as it was


@dataclass(frozen=True)
class AutogradFunction:
    """A custom autograd function."""

    function: Any

    @property
    def __name__(self) -> str:
        """The function's name."""
        return str(self.function.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the function."""
        return self.function.apply(*args, **kwargs)


@contextmanager
def _functions(listener: Listener, opened: Iterable[nn.Module]) -> Iterator[None]:
    """Record the mask functions of ``transformers`` as calls.

    Whether they drop a mask depends on the data, so they decide again in each forward.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None:
        yield
        return
    originals = {
        function: name
        for name, function in vars(masks).items()
        if name.startswith("create_") and callable(function)
    }
    replaced = []
    for module_name in {parent.__module__ for module in opened for parent in type(module).__mro__}:
        namespace = vars(sys.modules[module_name])
        for name, function in list(namespace.items()):
            if callable(function) and _hashable_in(function, originals):
                replaced.append((namespace, name, function))
                namespace[name] = _recorded(listener, function)
    try:
        yield
    finally:
        for namespace, name, function in replaced:
            namespace[name] = function


def _hashable_in(value: Any, known: Mapping[Any, Any]) -> bool:
    try:
        return value in known
    except TypeError:
        return False


def _recorded(listener: Listener, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if listener.pauses:
            return function(*args, **kwargs)
        return listener.call(Exported(function), args, kwargs)

    return call


_exporting = threading.RLock()


@dataclass(frozen=True)
class Exported:
    """A function that runs as under ``torch.export``, so that its result is always a tensor."""

    function: Callable[..., Any]

    @property
    def __name__(self) -> str:
        """The function's name."""
        return str(getattr(self.function, "__name__", "function"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        with _exporting:  # the flag is that of all threads, and stages may be threads
            before = torch.compiler._is_exporting_flag
            torch.compiler._is_exporting_flag = True
            try:
                return self.function(*args, **kwargs)
            finally:
                torch.compiler._is_exporting_flag = before
