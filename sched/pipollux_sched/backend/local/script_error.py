"""What a replica's script died of, as the replica has left it on the disk.

`script_main` writes it, torchrun's agent copies it to where TORCHELASTIC_ERROR_FILE told it to, and
it is read here; also by a scheduler that was not there when it happened.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

_NO_REMEDY = frozenset(("SyntaxError", "ImportError"))
"""Exceptions that another try of the same script would meet again, subclasses among them."""


class ScriptError(NamedTuple):
    """The exception that ended a script."""

    text: str
    """Type and message, one line."""
    cannot_start: bool
    """Whether it says that the script, or what it imports, is not as it must be: no other try would
    end otherwise, unless the script has come further before."""


def read_error(path: Path) -> ScriptError | None:
    """Read an error file; None where there is none, or where its agent has written it."""
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
