"""The values that a type annotation of a pydantic model allows, in words."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

_NUMBERS = {int: "a whole number", float: "a number"}


class Spot(NamedTuple):
    """One value in the data of a model, by its annotation."""

    annotation: Any
    """Without the metadata of `Annotated`."""
    metadata: tuple[Any, ...] = ()
    field: FieldInfo | None = None
    """The field whose value it is; None: it is an entry of a list or mapping."""

    @property
    def model(self) -> type[BaseModel] | None:
        """The model of its fields, if it has fields."""
        found = [one.annotation for one in self.members if is_model(one.annotation)]
        return found[0] if found else None

    @property
    def members(self) -> list[Spot]:
        """The types of a union except None; of any other type, itself."""
        if get_origin(self.annotation) not in (Union, types.UnionType):
            return [self]
        parts = [spot_of(part) for part in get_args(self.annotation) if part is not type(None)]
        # Bounds beside a union hold for all of its types.
        parts = [one._replace(metadata=one.metadata + self.metadata) for one in parts]
        return [inner for one in parts for inner in one.members]

    @property
    def bounds(self) -> dict[str, Any]:
        """Bounds of the value or of its length, by pydantic's names such as ge."""
        return {
            name: getattr(item, name)
            for item in self.metadata
            for name in ("ge", "gt", "le", "lt", "min_length", "max_length")
            if getattr(item, name, None) is not None
        }

    def inside(self, step: int | str) -> Spot | None:
        """Return the value at a step of a location; None: not known."""
        if self.model is not None:
            fields = {field.alias or name: field for name, field in self.model.model_fields.items()}
            field = fields.get(str(step))
            return field and _spot_of_field(field)
        for one in self.members:
            origin, args = get_origin(one.annotation), get_args(one.annotation)
            if not (args and isinstance(origin, type)):
                continue
            if issubclass(origin, Mapping):
                return spot_of(args[1])
            if issubclass(origin, Sequence) and isinstance(step, int):
                fixed = origin is tuple and args[-1] is not Ellipsis
                return spot_of(args[step if fixed and step < len(args) else 0])
        return None

    def spell(self) -> str:
        """Return the allowed values in words, as in `a whole number of at least 1`."""
        members = [one.annotation for one in self.members]
        # A whole number is a number.
        chosen = [one for one in self.members if one.annotation is not int or float not in members]
        words = dict.fromkeys(_spell(one) for one in sorted(chosen, key=_is_bool))
        return ", ".join(words) if bool in members else " or ".join(words)


class Location(NamedTuple):
    """Where an error of pydantic's is.

    Pydantic's locations have a step for the type of a union, and for the key of a mapping, which
    the data do not have.
    """

    place: tuple[int | str, ...]
    """The steps that the data have."""
    spot: Spot | None
    """The value there; None: the model does not know it."""
    field: FieldInfo | None
    """The innermost field that the value belongs to."""
    is_of_union: bool
    """Whether the error is about one of the types of the value."""


def is_model(annotation: Any) -> bool:
    """Return whether an annotation is a class of pydantic models."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def spot_of(annotation: Any) -> Spot:
    """Return the value that an annotation describes."""
    metadata: list[Any] = []
    if get_origin(annotation) is Annotated:
        annotation, *beside = get_args(annotation)
        for item in beside:
            metadata += item.metadata if isinstance(item, FieldInfo) else [item]
    return Spot(annotation, tuple(metadata))


def _spot_of_field(field: FieldInfo) -> Spot:
    spot = spot_of(field.annotation)
    return Spot(spot.annotation, (*spot.metadata, *field.metadata), field)


def _is_bool(spot: Spot) -> bool:
    return spot.annotation is bool


def _spell(spot: Spot) -> str:
    kind, origin = spot.annotation, get_origin(spot.annotation)
    bounds = spot.bounds
    if is_model(kind):
        return "a mapping of fields"
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if kind is bool:
        return "true or false"
    if kind in _NUMBERS:
        return " ".join([_NUMBERS[kind], *_spell_bounds(bounds)])
    if kind in (str, SecretStr):
        return " ".join(["a text", *_spell_lengths(bounds, "character")])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping of names to values"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return " ".join(["a list", *(_spell_lengths(bounds, "item") or ["of values"])])
    return "a value"


def _spell_bounds(bounds: Mapping[str, Any]) -> list[str]:
    if bounds.keys() >= {"ge", "le"}:
        return [f"from {bounds['ge']} to {bounds['le']}"]
    words = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
    found = [f"{word} {bounds[name]}" for name, word in words.items() if name in bounds]
    return [" and ".join(found).replace("and of", "and")] if found else []


def _spell_lengths(bounds: Mapping[str, Any], unit: str) -> list[str]:
    least, most = bounds.get("min_length"), bounds.get("max_length")
    if least is None and most is None:
        return []
    if most is None:
        return [f"of at least {least} {unit}{'' if least == 1 else 's'}"]
    size = f"{least} to {most}" if least else f"at most {most}"
    return [f"of {size} {unit}{'' if most == 1 else 's'}"]


def locate(model: type[BaseModel], steps: Sequence[int | str]) -> Location:
    """Return what a location of pydantic's in the data of a model leads to."""
    spot: Spot | None = Spot(model)
    known: list[Spot] = []
    place: list[int | str] = []
    in_member = False
    for step in steps:
        if step == "[key]" and spot is not None and spot.inside(step) is None:
            continue  # the step before is the key; a mapping may also have a key of this name
        if spot is not None and len(spot.members) > 1 and not in_member:
            in_member = True
            continue
        spot, in_member = spot and spot.inside(step), False
        known += [spot] if spot else []
        place.append(step)
    field = next((one.field for one in reversed(known) if one.field), None)
    return Location(tuple(place), spot, field, in_member)
