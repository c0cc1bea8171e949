"""Errors in a user's measurements or parameters."""

from __future__ import annotations

from pipollux_perfmodel.errors import InputError


class ModelingError(InputError):
    """Invalid data: one sentence per problem, with location, value, and allowed values."""
