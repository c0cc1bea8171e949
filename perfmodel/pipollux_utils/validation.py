"""Pydantic errors as sentences with location (``nodes[1].slots``), value, and allowed values.

For an unknown field they have the closest known name.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic_core import ErrorDetails, PydanticCustomError

from .allowed_values import Location, locate
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
    found: dict[Problem, None] = {}  # each once: pydantic has an error for each type of a union
    missing: list[Problem] = []
    guessed: set[Place] = set()
    for details in errors:
        inside: Place = details.get("ctx", {}).get("place", ())
        where = locate(model, (*details["loc"], *inside))
        place = where.place
        if details["type"] == "missing":
            missing.append(Problem(place, "is missing; give " + _allowed(model, where)))
            continue
        if details["type"] == "extra_forbidden":
            guess = closest(str(place[-1]), _known_fields(model, place[:-1]))
            if guess:
                guessed.add((*place[:-1], guess))
        found[Problem(place, _text(model, where, details, written(place)))] = None
    return [*found, *(problem for problem in missing if problem.place not in guessed)]


def _text(model: type[BaseModel], where: Location, details: ErrorDetails, raw: str | None) -> str:
    context, value = details.get("ctx", {}), details["input"]
    match details["type"]:
        case "extra_forbidden":
            return _unknown_field(str(where.place[-1]), _known_fields(model, where.place[:-1]))
        case "value_error":
            return str(context["error"])
        case "placed":
            return str(context["text"])
        case "invalid_key":
            return f"the field {spell_value(where.place[-1])} is not a text; put it in quotes"
        case "literal_error":
            return _refused(where, value, str(context["expected"]))
        case "string_type" if not where.is_of_union and not isinstance(value, list | dict | tuple):
            if where.field is not None and not where.field.repr:
                return f"{_kind(value)} is not allowed; it must be a text: write it in quotes"
            text = spell_value(value) if raw is None else raw
            shown = spell_value(value) if value is None else text
            return f'{shown} is not allowed; it must be a text: write it in quotes, "{text}"'
        case kind if not kind.endswith(("_type", "_from_float")) and kind not in _FORMS:
            return _refused(where, value, expected(details))
    return _refused(where, value, _allowed(model, where))


def expected(details: ErrorDetails) -> str:
    """Return the allowed values in words, after `it must be`, as far as an error names them."""
    context, kind = details.get("ctx", {}), details["type"]
    for name, words in _BOUNDS.items():
        if name in context:
            bound = context[name]
            if isinstance(bound, float) and bound.is_integer():
                bound = int(bound)
            unit = f"{bound} {'character' if kind.startswith('string') else 'item'}"
            what = _KINDS.get(kind.partition("_")[0], "a list")
            return words.format(bound=bound, what=what, unit=unit + ("" if bound == 1 else "s"))
    if "expected" in context:  # of a Literal
        return str(context["expected"])
    known = _KINDS.get(kind.partition("_")[0])
    return known or details["msg"].removeprefix("Input should be ").removeprefix("it must be ")


_BOUNDS = {
    "ge": "at least {bound}",
    "gt": "above {bound}",
    "le": "at most {bound}",
    "lt": "below {bound}",
    "min_length": "{what} of at least {unit}",
    "max_length": "{what} of at most {unit}",
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping",
    "model": "a mapping",
    "finite": "a finite number",
}
_FORMS = {
    *("greater_than_equal", "greater_than", "less_than_equal", "less_than", "finite_number"),
    *("too_short", "too_long", "string_too_short", "string_too_long", "string_pattern_mismatch"),
}
"""Errors about a value of the right type."""


def _refused(where: Location, value: Any, allowed: str) -> str:
    return f"{_shown(where, value)} is not allowed; it must be {allowed}"


def _shown(where: Location, value: Any) -> str:
    hidden = where.field is not None and not where.field.repr
    return _kind(value) if hidden else spell_value(value)


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


def _allowed(model: type[BaseModel], where: Location) -> str:
    """Return the allowed values at a location: its field's `description`, else its type."""
    if where.spot is None or not where.place:
        return f"a mapping that begins with '{next(iter(model.model_fields))}:'"
    field = where.spot.field
    return (field and field.description) or where.spot.spell()


def _known_fields(model: type[BaseModel], place: Place) -> list[str]:
    spot = locate(model, place).spot
    if spot is None or spot.model is None:
        return []
    return [field.alias or name for name, field in spot.model.model_fields.items()]
