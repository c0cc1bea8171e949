"""The exception that ended a replica's script, as the replica left it on disk.

`script_main` writes it, and torchrun's agent copies it to the path in its own
TORCHELASTIC_ERROR_FILE. It is read here, also by a scheduler that was not running at the time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

_NO_REMEDY = frozenset(("SyntaxError", "ImportError"))
"""Exceptions that a restart of the same script would raise again, including subclasses."""


class ScriptError(NamedTuple):
    """The exception that ended a script."""

    text: str
    """Type and message, one line."""
    cannot_start: bool
    """Whether the script, or what it imports, is broken: a restart would end the same way, unless
    the script has come further before."""


def read_error(path: Path) -> ScriptError | None:
    """Read an error file; None if there is none, or if its agent has written it."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        lines = str(kept["message"]["message"]).splitlines()
        types, loaded = frozenset(kept["types"]), bool(kept["loaded"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    text = lines[0] if lines else ""
    if "SyntaxError" in types and len(lines) > 1:  # the first line says where, the last one what
        text = f"{lines[-1]} ({text.strip()})"
    return ScriptError(text, not loaded or not _NO_REMEDY.isdisjoint(types))
