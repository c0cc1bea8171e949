"""Docstrings that follow the fields of a class."""

from __future__ import annotations

import ast
import inspect
import textwrap


def attribute_docstrings(owner: type) -> dict[str, str]:
    """Return the docstring below each field of a class that has one, as one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(definition, ast.ClassDef)  # noqa: S101  # it is the source of a class
    found = {}
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            value, name = after.value, field.target
            if isinstance(value, ast.Constant) and isinstance(name, ast.Name):
                found[name.id] = " ".join(inspect.cleandoc(str(value.value)).split())
    return found
