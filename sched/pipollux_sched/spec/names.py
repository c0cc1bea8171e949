"""Names of jobs, families, teams and users."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

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
            f"'{name}' is not a name; a name begins with a lower-case letter, goes on with "
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


Name = Annotated[str, AfterValidator(_check_name)]
FamilyName = Annotated[str, AfterValidator(_check_family)]
"""A name, or an empty text for none."""
UserName = Annotated[str, AfterValidator(_check_user)]
