"""Values of an :class:`~pipollux_hybrid.Accumulator`: numbers and tensors."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from pipollux_hybrid.errors import ConfigurationError

__all__ = ["Key", "PendingSum", "Summable", "add", "check_key", "checked", "on_cpu"]

Key = str | int
Summable = int | float | Tensor


def check_key(key: Any) -> Key:
    """Return the key; a ConfigurationError unless it is a string or an integer."""
    if not isinstance(key, (str, int)):
        raise ConfigurationError(
            f"accumulator key {key!r} is a {type(key).__name__}: strings and integers are allowed"
        )
    return key


def checked(key: Key, value: Any) -> Summable:
    """Return the value as int, float, int64 or float64 tensor; else a ConfigurationError."""
    if isinstance(value, Tensor) and not value.is_complex():
        exact = not value.is_floating_point()
        return value.detach().to(torch.int64 if exact else torch.float64, copy=True)
    # numpy's scalars are instances of these, and cannot be loaded with weights_only.
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise ConfigurationError(
        f"accumulator[{key!r}] was given a {type(value).__name__}: real numbers and tensors of "
        "them can be summed"
    )


def add(key: Key, total: Summable, amount: Summable) -> Summable:
    """Return the sum of two amounts; a ConfigurationError for tensors of different shapes."""
    if isinstance(total, Tensor) and isinstance(amount, Tensor):
        if total.shape != amount.shape:
            raise ConfigurationError(
                f"accumulator[{key!r}] is of shape {tuple(total.shape)} and was given shape "
                f"{tuple(amount.shape)}: tensors are summed element by element, so use one key for "
                "each shape"
            )
        # The total keeps its device; the copy is asynchronous.
        amount = amount.to(total.device, non_blocking=True)
    return total + amount


def on_cpu(amount: Summable) -> Summable:
    """Return a copy in main memory."""
    return amount.detach().to("cpu", copy=True) if isinstance(amount, Tensor) else amount


class PendingSum:
    """The value of ``accumulator[key]`` outside of ``synchronized()``, which can only be added to.

    ``accumulator[key] += x`` gets it, adds to it, and sets the key to the result.
    """

    __slots__ = ("amount", "key")
    __hash__ = None  # type: ignore[assignment]  # comparisons raise

    def __init__(self, key: Key, amount: Summable) -> None:
        self.key = key
        self.amount = amount

    def __add__(self, other: Any) -> PendingSum:
        return PendingSum(self.key, add(self.key, self.amount, checked(self.key, other)))

    def __sub__(self, other: Any) -> PendingSum:
        return PendingSum(self.key, add(self.key, self.amount, -checked(self.key, other)))

    def _refuse(self, *_: Any) -> Any:
        raise ConfigurationError(
            f"accumulator[{self.key!r}] was read outside of synchronized(), where a replica knows "
            "its own share only: read it inside `with accumulator.synchronized():`"
        )

    __float__ = __int__ = __bool__ = __index__ = __str__ = __repr__ = __format__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = __round__ = _refuse
    __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = __radd__ = __rsub__ = _refuse
    __rmul__ = __rtruediv__ = _refuse
