"""Limits on the arguments, variables and paths of a job's processes."""

from __future__ import annotations

from collections.abc import Sequence

MOST_BYTES = 100_000
"""Largest size of an argument or variable, below Linux's limit of 131071 bytes."""
MOST_PATH = 4096
"""Largest length of a path: PATH_MAX on Linux."""


def check_args(args: Sequence[str]) -> Sequence[str]:
    """Return the arguments of a script; raise ValueError if one cannot be passed to a process."""
    for index, text in enumerate(args):
        check_handed_over(f"entry {index}", text)
    return args


def check_handed_over(what: str, text: str) -> None:
    """Raise ValueError for an argument, or a variable with its value, that Linux cannot pass on."""
    size = len(text.encode(errors="surrogatepass"))
    if size > MOST_BYTES:
        raise ValueError(
            f"{what} has {size} bytes; a process is given at most {MOST_BYTES} in one text, so put "
            "it into a file"
        )
    if "\0" in text:
        raise ValueError(f"{what} holds a NUL character; leave it out")


def check_path(text: str) -> str:
    """Return the path of a file or folder; raise ValueError if it is empty, or no valid path."""
    if not text.strip():
        raise ValueError("is empty; give a path")
    if len(text) > MOST_PATH or "\0" in text:
        raise ValueError(
            f"{text[:20]!a}... is not a path; a path has at most {MOST_PATH} characters, none NUL"
        )
    return text
