"""Options of policies, defined by the typed keyword parameters of their constructors.

A parameter is annotated as `Annotated[type, Field(ge=..., description=...)]`. Constructors, command
lines, help and reference pages all use this definition.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache, wraps
from types import NoneType
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin
from typing import get_type_hints as type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

Init = TypeVar("Init", bound=Callable[..., None])

KINDS = {
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    tuple: "numbers separated by /",
}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True)
class Option:
    """An option of a policy."""

    name: str
    default: Any
    meaning: str
    allowed: str
    """The values, as in "a number between 0 and 1"."""
    example: Any
    adapter: TypeAdapter[Any]

    def check(self, value: Any) -> Any:
        """Return a value in the option's type; ValueError if it is not allowed."""
        try:
            return self.adapter.validate_python(value)
        except ValidationError:
            raise ValueError(f"{self.name}: {value} must be {self.allowed}") from None

    def parse(self, text: str) -> Any:
        """Return the value that `show` writes as `text`; ValueError if it is not allowed."""
        if text == "none" and self.allowed.endswith(", or none"):
            return None
        if not isinstance(self.default, tuple):
            return self.check(text)
        try:
            return self.check(text.split("/"))
        except ValueError:
            raise ValueError(f"{self.name}: {text} must be {self.allowed}") from None


def show(value: Any) -> str:
    """Return the value of an option as text."""
    if isinstance(value, list | tuple):
        return "/".join(map(show, value))
    return str(value).lower().removesuffix(".0")


@cache
def options_of(constructor: Callable[..., Any]) -> Mapping[str, Option]:
    """Return the options of a constructor by name: its keyword parameters except `seed`."""
    source: Any = constructor
    if inspect.isclass(constructor) and not is_dataclass(constructor):
        source = constructor.__init__
    hints = type_hints(source, include_extras=True)
    return {
        one.name: _option(one.name, one.default, hints[one.name])
        for one in inspect.signature(constructor).parameters.values()
        if one.kind is one.KEYWORD_ONLY and one.name != "seed"
    }


def _option(name: str, default: Any, hint: Any) -> Option:
    kind, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    field = next((one for one in metadata if isinstance(one, FieldInfo)), FieldInfo())
    types = get_args(kind)
    optional = NoneType in types
    base = next(one for one in types if one is not NoneType) if optional else kind
    allowed = field.title or _allowed(get_origin(base) or base, field)
    return Option(
        name=name,
        default=default,
        meaning=field.description or "",
        allowed=allowed + (", or none" if optional else ""),
        example=field.examples[0] if field.examples else default,
        adapter=TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False)),
    )


def _allowed(kind: Any, field: FieldInfo) -> str:
    found = {
        name: getattr(one, name)
        for one in field.metadata
        for name in BOUNDS
        if getattr(one, name, None) is not None
    }
    if found.keys() == {"ge", "le"}:
        return f"{KINDS[kind]} between {found['ge']:g} and {found['le']:g}"
    unbounded = kind is float and not found.keys() & {"le", "lt"}
    words = " and ".join(f"{BOUNDS[name]} {value:g}" for name, value in found.items())
    return f"{'a finite number' if unbounded else KINDS[kind]} {words}".rstrip()


def checked(init: Init) -> Init:
    """Check the options that a constructor gets; keep those that differ from the default as the
    attribute `options`.
    """

    @wraps(init)
    def construct(self: Any, *args: Any, **given: Any) -> None:
        known = options_of(init)
        found = {name: known[name].check(value) for name, value in given.items() if name in known}
        init(self, *args, **{**given, **found})
        changed = {name: value for name, value in found.items() if value != known[name].default}
        self.options = changed

    return cast("Init", construct)


def parse_options(policy: str, text: str, known: Mapping[str, Option]) -> dict[str, Any]:
    """Return the options in "option=value,..."; ValueError names the policy, option and fix."""
    found: dict[str, Any] = {}
    for piece in text.split(","):
        name, _, value = (part.strip() for part in piece.partition("="))
        refused = f"policy: {policy}:{piece.strip()} is invalid;"
        if not known:
            raise ValueError(f"{refused} {policy} has no options; write {policy}")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            names = ", ".join(known)
            raise ValueError(f"{refused} {policy} has no option {name!r}; {hint}it has {names}")
        if name in found:
            raise ValueError(f"{refused} {name} is given twice; leave one of them out")
        option = known[name]
        try:
            found[name] = option.parse(value)
        except ValueError:
            raise ValueError(
                f"{refused} {name} must be {option.allowed}; "
                f"write, for example, {policy}:{name}={show(option.example)}"
            ) from None
    return found
