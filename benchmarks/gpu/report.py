"""What the parts of a day print, as JSON and as Markdown.

A part prints tables in Markdown, values as lines of JSON, or text, such as a test run's summary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Results", "Table", "page", "results_of"]

TEXT = 30
"""Last lines of text that are kept."""


@dataclass(frozen=True)
class Table:
    """A table that a part printed."""

    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True)
class Results:
    """What a part printed."""

    tables: list[Table] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)


def results_of(printed: str) -> Results:
    """Return the tables, the values and the last lines of text."""
    found = Results()
    in_table = False
    for line in printed.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not in_table:
                found.tables.append(Table(cells))
            elif not all(set(cell) <= set("-:") for cell in cells):
                found.tables[-1].rows.append(cells)
            in_table = True
            continue
        in_table = False
        values = _values(line)
        if values is not None:
            found.values.update(values)
        elif line.strip():
            found.text.append(line.rstrip())
    del found.text[:-TEXT]
    return found


def _values(line: str) -> dict[str, Any] | None:
    """Return the content of a line of JSON, or None."""
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def page(day: Mapping[str, Any]) -> str:
    """Return the results of a day as a page of Markdown."""
    title = "# GPU day" if day["for_publication"] else "# GPU day on a CPU: not for publication"
    where = ", ".join(f"{key} {value}" for key, value in day["environment"].items())
    lines = [title, "", where, ""]
    parts = day["parts"]
    lines += _table(
        ["part", "result", "seconds"],
        [[name, part["status"], f"{part['seconds']}"] for name, part in parts.items()],
    )
    for name, part in parts.items():
        lines += ["", f"## {name}", "", f"{part['title']}."]
        lines += ["", f"    {part['command']}"] if part["command"] else []
        lines += _section(part["results"], part["errors"])
    return "\n".join(lines) + "\n"


def _section(results: Mapping[str, Any], errors: list[str]) -> Iterator[str]:
    """Yield the lines of a part's results."""
    for table in results["tables"]:
        yield from ["", *_table(table["columns"], table["rows"])]
    if results["values"]:
        yield from ["", *_table(["what", "measured"], _flat(results["values"]))]
    for text in (results["text"], errors):
        if text:
            yield from ["", "```text", *(line.replace("```", "'''") for line in text), "```"]


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    return [
        f"| {' | '.join(columns)} |",
        "|" + "---|" * len(columns),
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[list[str]]:
    """Return a row for each value, with the path to it."""
    rows: list[list[str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            value = {str(number): item for number, item in enumerate(value, 1)}
        if isinstance(value, dict):
            rows += _flat(value, f"{name} ")
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            rows.append([name, shown.replace("|", "\\|").replace("\n", " ")])
    return rows
