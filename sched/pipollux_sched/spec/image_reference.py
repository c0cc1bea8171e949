"""Form of references to container images.

The grammar is that of container registries, Docker, Podman and Kubernetes: an optional registry, a
name, an optional tag and an optional digest.
"""

from __future__ import annotations

import re

__all__ = ["MOST_OF_IMAGE", "check_image"]

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
