"""Pydantic errors as sentences with location (``nodes[1].slots``), value, and allowed values.

For an unknown field they have the closest known name.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from .text import clean

Place = tuple[int | str, ...]


class Problem(NamedTuple):
    """One problem in some data: the error and the allowed values."""

    place: Place
    text: str

    def sentence(self) -> str:
        """Return place and text as one sentence."""
        return clean(f"{spell(self.place)}: {self.text}" if self.place else self.text)


def problem_at(place: Place, text: str) -> PydanticCustomError:
    """Return an error about a nested location, for a validator to raise."""
    return PydanticCustomError("placed", "{text}", {"text": text, "place": place})


def spell(place: Sequence[int | str]) -> str:
    """Return a place in the form ``nodes[1].slots``."""
    text = ""
    for step in place:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{step}" if text else str(step)
    return text


def closest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name closest to `name`, or None."""
    match = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return match[0] if match else None


def problems(
    errors: Iterable[ErrorDetails],
    model: type[BaseModel],
    written: Callable[[Place], str | None] = lambda _: None,
) -> list[Problem]:
    """Return pydantic's errors about `model` as problems, in the order of the data.

    Omits a missing field that was evidently misspelt, which the unknown field covers. Hides the
    values of fields with ``repr=False``, which may be secret. `written` returns the value at a
    location as written in its file; None: not in a file, or not a single value.
    """
    found: list[Problem] = []
    missing: list[Problem] = []
    guessed: set[Place] = set()
    for details in errors:
        place: Place = tuple(details["loc"])
        if details["type"] == "missing":
            missing.append(Problem(place, "is missing; give " + _allowed(model, place)))
            continue
        if details["type"] == "extra_forbidden":
            guess = closest(str(place[-1]), _known_fields(model, place[:-1]))
            if guess:
                guessed.add((*place[:-1], guess))
        place += details.get("ctx", {}).get("place", ())
        found.append(Problem(place, _text(model, place, details, written(place))))
    return found + [problem for problem in missing if problem.place not in guessed]


def _text(model: type[BaseModel], place: Place, details: ErrorDetails, written: str | None) -> str:
    context = details.get("ctx", {})
    match details["type"]:
        case "extra_forbidden":
            return _unknown_field(str(place[-1]), _known_fields(model, place[:-1]))
        case "value_error":
            return str(context["error"])
        case "placed":
            return str(context["text"])
        case "invalid_key":
            return f"the field {spell_value(place[-1])} is not a text; put it in quotes"
        case "greater_than_equal" | "less_than_equal" | "literal_error" | "string_type":
            pass
        case "greater_than" | "less_than":
            pass
        case "string_pattern_mismatch" | "string_too_long":
            pass
        case kind if not kind.endswith(("_type", "_from_float")):
            return f"{_shown(model, place, details['input'])} is not allowed: {details['msg']}"
    value = details["input"]
    if details["type"] == "string_type" and not isinstance(value, list | dict | tuple):
        field = _field(model, place)
        if field is not None and not field.repr:
            return f"{_kind(value)} is not allowed; it must be a text: write it in quotes"
        text = spell_value(value) if written is None else written
        shown = spell_value(value) if value is None else text
        return f'{shown} is not allowed; it must be a text: write it in quotes, "{text}"'
    return f"{_shown(model, place, value)} is not allowed; it must be " + _expected(
        model, place, details
    )


def _shown(model: type[BaseModel], place: Place, value: Any) -> str:
    field = _field(model, place)
    return spell_value(value) if field is None or field.repr else _kind(value)


def _kind(value: Any) -> str:
    if value is None:
        return "an empty value"
    kinds: tuple[tuple[Any, str], ...] = (
        (bool, "true or false"),
        (int | float, "a number"),
        (date, "a date"),
        (str, "a text"),
        (dict, "a mapping"),
    )
    return next((kind for types, kind in kinds if isinstance(value, types)), "a list")


def _expected(model: type[BaseModel], place: Place, details: ErrorDetails) -> str:
    """Return the allowed values at a location with a wrong type or a value out of bounds."""
    if details["type"] == "literal_error":
        return str(details["ctx"]["expected"])
    return _allowed(model, place)


def _unknown_field(name: str, known: Sequence[str]) -> str:
    guess = closest(name, known)
    if guess:
        return f"unknown field; did you mean '{guess}'?"
    return f"unknown field; choose from {', '.join(known)}" if known else "unknown field"


def spell_value(value: Any) -> str:
    """Return a value as in YAML or JSON, shortened to fit a sentence."""
    if value is None:
        return "an empty value"
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = "a value that contains itself"
    return text if len(text) <= 60 else text[:57] + "..."


def _allowed(model: type[BaseModel], place: Place) -> str:
    """Return the allowed values at a location: its field's `description`, else its bounds."""
    field = _field(model, place)
    if field is None:
        return f"a mapping that begins with '{next(iter(model.model_fields))}:'"
    if isinstance(place[-1], int):
        return "a mapping of fields" if _models(field.annotation) else "a text"
    if _owner(model, place[:-1]) is None:  # it is a value of a mapping of texts
        return "a text"
    if field.description:
        return field.description
    lowest = [item.ge for item in field.metadata if hasattr(item, "ge")]
    return f"a whole number of at least {lowest[0]}" if lowest else "a value"


def _known_fields(model: type[BaseModel], place: Place) -> list[str]:
    owner = _owner(model, place)
    if owner is None:
        return []
    return [field.alias or name for name, field in owner.model_fields.items()]


def _field(model: type[BaseModel], place: Place) -> FieldInfo | None:
    named = [index for index, step in enumerate(place) if isinstance(step, str)]
    while named:
        last = named.pop()
        owner = _owner(model, place[:last])
        if owner is not None:
            fields = {field.alias or name: field for name, field in owner.model_fields.items()}
            return fields.get(str(place[last]))
    return None


def _owner(model: type[BaseModel], place: Place) -> type[BaseModel] | None:
    for step in place:
        if isinstance(step, int):
            continue
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        inside = _models(fields[step].annotation) if step in fields else []
        if not inside:
            return None
        model = inside[0]
    return model


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _models(part)]
