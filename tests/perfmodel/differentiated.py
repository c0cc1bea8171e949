"""Exact gradients of the formulas of step time, by autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias
from unittest import mock

import autograd
import autograd.numpy

from pipollux_perfmodel.timing import gpipe, step_time

Numbers: TypeAlias = Any


def gradient_of(function: Callable[..., Numbers], *point: Numbers, argument: int = 0) -> Numbers:
    """Return the gradient of a function of step times; the formulas run on autograd's numpy."""
    arrays = autograd.numpy
    with mock.patch.object(gpipe, "np", arrays), mock.patch.object(step_time, "np", arrays):
        return autograd.grad(function, argument)(*point)
