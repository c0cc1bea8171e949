"""Fields of a pydantic model as rows of a table: type, default, and the docstring below each."""

from __future__ import annotations

from pydantic import BaseModel

from pipollux_protocol.reference import literal, type_name

from .attributes import attribute_docstrings

MOST_OF_DEFAULT = 20
"""Characters of a default; longer ones are a nested object, which has a table itself."""


def rows(model: type[BaseModel]) -> list[tuple[str, str, str, str]]:
    """Return name, type, default and meaning of each field.

    Raises:
        ValueError: a field has no docstring.
    """
    schema = model.model_json_schema()
    required, meanings = schema.get("required", []), attribute_docstrings(model)
    found = []
    for name, entry in schema["properties"].items():
        if name not in meanings:
            raise ValueError(f"{model.__name__}.{name} has no docstring")
        default = "required" if name in required else literal(entry.get("default"))
        if len(default) > MOST_OF_DEFAULT:
            default = "none"
        kind = type_name(entry)
        if "](#" not in kind:  # no link to an object
            kind = entry.get("description", kind)
        found.append((f"`{name}`", kind, default.replace("`null`", "none"), meanings[name]))
    return found
