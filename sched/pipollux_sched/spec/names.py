"""Names of jobs, families, teams and users."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
NAME_LENGTH = 63
_USER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")


def _check_name(name: str) -> str:
    if len(name) > NAME_LENGTH:
        raise ValueError(
            f"'{name[:20]}...' has {len(name)} characters; a name has at most {NAME_LENGTH}"
        )
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a name; a name begins with a lower-case letter, goes on with "
            "lower-case letters, digits and '-', and ends with a letter or digit"
        )
    return name


def _check_user(name: str) -> str:
    if len(name) > NAME_LENGTH or not _USER_NAME.fullmatch(name):
        raise ValueError(
            f"'{name[:80]}' is not the name of a user; use up to {NAME_LENGTH} letters, digits, "
            "'-', '_', '.' and '@', with a letter or digit at the beginning"
        )
    return name


def _check_family(text: str) -> str:
    return _check_name(text) if text else ""


def schema_bounds(
    longest: int, pattern: re.Pattern[str] | None = None, *, empty: bool = False
) -> Any:
    """Return the JSON schema of a text that a validator with its own error messages checks."""
    bounds: dict[str, Any] = {"maxLength": longest} | ({} if empty else {"minLength": 1})
    if pattern is not None:
        bounds["pattern"] = f"^({pattern.pattern})?$" if empty else f"^{pattern.pattern}$"
    return Field(json_schema_extra=bounds)


Name = Annotated[str, AfterValidator(_check_name), schema_bounds(NAME_LENGTH, _NAME)]
FamilyName = Annotated[
    str, AfterValidator(_check_family), schema_bounds(NAME_LENGTH, _NAME, empty=True)
]
"""A name, or an empty text for no family."""
UserName = Annotated[str, AfterValidator(_check_user), schema_bounds(NAME_LENGTH, _USER_NAME)]
