"""Names of jobs, families, teams and users, and references to images.

The grammar of a reference is that of container registries, Docker, Podman and Kubernetes: an
optional registry, a name, an optional tag and an optional digest.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

MOST_OF_IMAGE = 512
"""Largest length of a reference: a name of 255 characters, a tag of 128 and a digest."""
_MOST_OF_NAME = 255

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_REGISTRY = rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::[0-9]{{1,5}})?"
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?P<name>(?:{_REGISTRY}/)?{_PART}(?:/{_PART})*)"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?"
    r"(?:@(?:sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}))?"
)
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
NAME_LENGTH = 63
_USER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")


def check_image(text: str) -> str:
    """Return a reference after checking its form, or raise ValueError.

    Example:
        >>> check_image("registry.example:5000/team/train:2.1")
        'registry.example:5000/team/train:2.1'
    """
    found = _REFERENCE.fullmatch(text) if len(text) <= MOST_OF_IMAGE else None
    if found is None or len(found["name"]) > _MOST_OF_NAME:
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise ValueError(
            f"{shown!r} is not a reference to an image; give registry/name:tag or "
            f"registry/name@sha256:DIGEST, of which only the name (lower-case letters, digits and "
            f"'.', '_', '-', '/' between them, at most {_MOST_OF_NAME}) must be there"
        )
    return text


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
