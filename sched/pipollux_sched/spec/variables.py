"""Environment variables of a job's processes: the names and values that are allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pipollux_protocol.environment import RENDEZVOUS, VARIABLES

VALUE_LIMIT = 32 * 1024
TOTAL_LIMIT = 256 * 1024
"""Largest number of characters of all names and values; Linux limits them to some megabytes."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = re.compile(
    r"(PIPOLLUX|TORCHELASTIC|PET)_.*|MASTER_(ADDR|PORT)|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)"
    r"|ROLE_NAME|PYTHON_EXEC|TORCH_ELASTIC_SHUTDOWN_TIMEOUT|CUDA_VISIBLE_DEVICES"
)
_FOR_USERS = {variable.name for variable in VARIABLES if variable.set_by == "user"} - {
    RENDEZVOUS.name  # jobs of a scheduler refuse it
}


def is_reserved(name: str) -> bool:
    """Return whether only the scheduler may set a variable, because it identifies a replica.

    Example:
        >>> [name for name in ("RANK", "PIPOLLUX_TIMEOUT", "PIPOLLUX_TOKEN") if is_reserved(name)]
        ['RANK', 'PIPOLLUX_TOKEN']
    """
    return name not in _FOR_USERS and _RESERVED.fullmatch(name) is not None


def check_name(name: str) -> None:
    """Raise ValueError for an invalid name, and a variable that the scheduler sets itself."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"'{name:.80}' is not a variable's name; use letters, digits and '_', "
            "and no digit at the beginning"
        )
    if is_reserved(name):
        raise ValueError(f"'{name}' is set by the scheduler; remove it here")


def check_variables(environment: dict[str, str]) -> dict[str, str]:
    """Return variables; ValueError, without secret values, if a process cannot receive them."""
    for name, value in environment.items():
        check_name(name)
        if len(value) > VALUE_LIMIT:
            raise ValueError(
                f"'{name:.80}' has a value of {len(value)} characters; at most {VALUE_LIMIT} are "
                "allowed: put the text in a file, and its path here"
            )
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(
                f"'{name:.80}' has a value that no variable can have: remove U+0000 and lone "
                "surrogates from it"
            )
    total = sum(len(name) + len(value) for name, value in environment.items())
    if total > TOTAL_LIMIT:
        raise ValueError(
            f"names and values have {total} characters; at most {TOTAL_LIMIT} are allowed: put "
            "long texts in files"
        )
    return environment


def hide_values(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's spec for display and logs: its environment has names without values.

    A list of names is not a valid environment, so the result cannot be mistaken for the full spec.

    Example:
        >>> hide_values({"name": "digits", "environment": {"WANDB_API_KEY": "secret"}})
        {'name': 'digits', 'environment': ['WANDB_API_KEY']}
    """
    environment = spec.get("environment")
    return {**spec, "environment": sorted(environment)} if environment else dict(spec)
