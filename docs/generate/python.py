"""`reference/python.md`, from the docstrings of the names that the packages export."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from pipollux_protocol.reference import table

from .notes import Notes

PACKAGES = {"pipollux": "Training", "pipollux_perfmodel": "Performance model"}
KINDS = {"class": "Classes", "exception": "Exceptions", "function": "Functions"}


def page() -> str:
    """Return the page, as Markdown."""
    notes = Notes("python")
    text = "\n".join(_lines(notes)) + "\n"
    notes.close()
    return text


def _lines(notes: Notes) -> Iterator[str]:
    yield "# Python API"
    yield ""
    yield "<!-- Generated from the docstrings of the packages by `make reference`. -->"
    yield from notes.lines("introduction")
    for package, heading in PACKAGES.items():
        yield ""
        yield f"## {heading}: `{package}`"
        yield from notes.lines(package)
        module = importlib.import_module(package)
        things = {name: getattr(module, name) for name in sorted(module.__all__)}
        for kind, title in KINDS.items():
            rows = [
                (f"[`{name}`](../api/{package}.html#{name})", _summary(thing))
                for name, thing in things.items()
                if _kind(thing) == kind
            ]
            if rows:
                yield ""
                yield f"**{title}**"
                yield ""
                yield from table(("name", "description"), rows)
    yield from notes.lines("other packages")


def _kind(thing: Any) -> str:
    if inspect.isclass(thing):
        return "exception" if issubclass(thing, BaseException) else "class"
    return "function"


def _summary(thing: Any) -> str:
    """Return the first sentence of a docstring, without roles of other tools."""
    first = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return re.sub(r":[a-z]+:`~?([^`]*)`", r"`\1`", first)
