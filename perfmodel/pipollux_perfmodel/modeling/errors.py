"""Errors in a user's measurements or parameters."""

from __future__ import annotations

from pipollux_perfmodel.errors import InputError


class ModelingError(InputError):
    """Data that cannot be used: one sentence a problem, with place, value, and what is allowed."""
