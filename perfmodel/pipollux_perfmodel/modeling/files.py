"""JSON files written by users, with readable errors; duplicate keys in an object are errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pipollux_perfmodel import LayerProfile
from pipollux_utils.text_file import not_text, read_text_file
from pipollux_utils.validation import spell_value

from .errors import ModelingError

STANDARD_INPUT = "-"
"""Stands for standard input where a path is expected."""


def decode(text: str) -> Any:
    """Decode one JSON value; ValueError with the problem and its location."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        where = f"column {error.colno}"
        if error.lineno > 1:
            where = f"line {error.lineno}, {where}"
        raise ValueError(f"not valid JSON: {error.msg} ({where})") from None
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    except ValueError as error:
        if "digits" in str(error):
            raise ValueError("a number has thousands of digits; write at most 17") from None
        raise


def read_text(path: str | Path) -> tuple[str, str]:
    """Return the text of a file, or of standard input for ``-``, and the name of its source. Raises
    ModelingError if the file is missing, cannot be read, or is not UTF-8.
    """
    if str(path) != STANDARD_INPUT:
        return read_text_file(Path(path), ModelingError), str(path)
    name = "<stdin>"
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig"), name
    except UnicodeDecodeError as error:
        raise ModelingError(not_text(name, error)) from None


def read_layers(path: str | Path) -> LayerProfile:
    """Read `layers.json`, the costs of a model's layers (`LayerProfile.to_json_object`). Raises
    ModelingError with the file, the key, its value and the allowed values.
    """
    text, name = read_text(path)
    try:
        data = decode(text)
        if not isinstance(data, dict):
            raise ValueError(
                f'{spell_value(data)} is not an object; it must begin with {{"version": 1'
            )
        return LayerProfile.from_json_object(data)
    except OverflowError:
        raise ModelingError(f"{name}: a number is too large; give finite numbers") from None
    except ValueError as error:
        raise ModelingError(f"{name}: {str(error).removeprefix('layer profile: ')}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"'{twice}' occurs twice in one object; keep one of them")
    return found
