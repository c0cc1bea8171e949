"""Environment variables that a job's processes are given: names and values that are allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["check_variables", "is_reserved"]

VALUE_LIMIT = 32 * 1024
"""Characters of a value."""
TOTAL_LIMIT = 256 * 1024
"""Characters of all names and values; Linux starts no program with more than some megabytes."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = re.compile(
    r"(PIPOLLUX|TORCHELASTIC|PET)_.*|MASTER_(ADDR|PORT)|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)"
    r"|ROLE_NAME|PYTHON_EXEC|TORCH_ELASTIC_SHUTDOWN_TIMEOUT|CUDA_VISIBLE_DEVICES"
)


def is_reserved(name: str) -> bool:
    """Say whether a variable tells a replica its place in its job, so that nobody else sets it.

    Example:
        >>> [name for name in ("RANK", "SEED", "PIPOLLUX_TOKEN") if is_reserved(name)]
        ['RANK', 'PIPOLLUX_TOKEN']
    """
    return _RESERVED.fullmatch(name) is not None


def check_variables(environment: Mapping[str, str]) -> None:
    """Refuse what a process cannot be given, or would be given otherwise.

    A message never holds a value, which may be secret.

    Raises:
        ValueError: one sentence that names the variable.
    """
    for name, value in environment.items():
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"'{name:.80}' is not a variable's name; use letters, digits and '_', "
                "and no digit at the beginning"
            )
        if is_reserved(name):
            raise ValueError(f"'{name}' is set by the scheduler; remove it here")
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
