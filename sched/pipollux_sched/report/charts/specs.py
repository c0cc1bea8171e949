"""Specs of charts, which `curves.js`, `timeline.js` and `scatter.js` draw; None is not sent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, TypeAlias

from markupsafe import Markup

Point: TypeAlias = tuple[float, float]
Tip: TypeAlias = Sequence[str | tuple[str, str]]
"""Lines of a tooltip: a text, or a label and its value."""

NUM_COLOURS = 8
"""Number of job colours in the style sheet; further jobs start over."""
SCRIPTS = (
    *("dom.js", "format.js", "hover.js", "axes.js", "figure.js"),
    *("curves.js", "timeline.js", "scatter.js", "page.js"),
)
"""The modules of a page with charts; each imports only from those before it."""
LIBRARY = "plot.min.js"
"""The charting library, in `vendor/`."""


@dataclass(frozen=True)
class Axis:
    """The horizontal axis: the format of its values, its ends, its label."""

    kind: Literal["elapsed", "whole", "number", "length"]
    low: float
    high: float
    name: str | None = None
    log: bool | None = None


@dataclass(frozen=True)
class Line:
    """A curve with gaps between its pieces; `colour` None: the chart's colour."""

    name: str
    pieces: Sequence[Sequence[Point]]
    style: Literal["", "step", "area"] = ""
    colour: int | None = None


@dataclass(frozen=True)
class Panel:
    """Curves on one vertical axis, which begins at 0 with `zero` and ends at `high`."""

    name: str
    head: str
    kind: Literal["number", "whole", "share"]
    height: float
    lines: Sequence[Line]
    unit: str | None = None
    zero: bool = True
    smooth: bool = False
    high: float | None = None


@dataclass(frozen=True)
class Mark:
    """The start of an attempt, or of an `elastic` membership: its tooltip, and the flag above."""

    at: float
    label: str
    flag: str
    elastic: bool | None = None


@dataclass(frozen=True)
class CurveChart:
    """Panels above each other; `bands` are hatched in the colour of job number `colour`."""

    title: str
    x: Axis
    panels: Sequence[Panel]
    bands: Sequence[tuple[float, float]] = ()
    marks: Sequence[Mark] = ()
    colour: int | None = None
    kind: str = "curves"


@dataclass(frozen=True)
class Group:
    """Rows that belong together, such as the slots of a node, up to `until`; see `timeline.js`."""

    name: str
    rows: int
    note: str | None = None
    title: str | None = None
    labels: Sequence[str] | None = None
    until: float | None = None
    ending: tuple[str, str] | None = None


@dataclass(frozen=True)
class Block:
    """A block over adjacent rows of a group: hatched from `start` to `to`, solid in between."""

    group: int
    row: int
    rows: int
    colour: int
    start: float
    begin: float
    end: float
    to: float
    words: Sequence[str]
    tip: int
    style: Literal["", "open", "forward", "backward"] = ""


@dataclass(frozen=True)
class Flag:
    """An event, drawn as a flag over the chart."""

    at: float
    words: str
    colour: int


@dataclass(frozen=True)
class TimelineChart:
    """Groups of rows over time; `row` and `gap` are heights, `right` the margin beside the axis."""

    title: str
    x: Axis
    row: float
    gap: float
    groups: Sequence[Group]
    blocks: Sequence[Block]
    tips: Sequence[Tip]
    flags: Sequence[Flag] = ()
    right: float | None = None
    seams: bool | None = None
    kind: str = "timeline"


@dataclass(frozen=True)
class Dot:
    """A measured value, its prediction, and its first prediction."""

    x: float
    y: float
    first: float
    colour: int
    words: str
    tip: Tip


@dataclass(frozen=True)
class ScatterChart:
    """Dots around a diagonal; values within the factor `band` are shaded."""

    title: str
    name: tuple[str, str]
    points: Sequence[Dot]
    band: float = 1.1
    kind: str = "scatter"


Chart: TypeAlias = CurveChart | TimelineChart | ScatterChart


def moments(values: Iterable[tuple[float, float | None]], start: float = 0.0) -> list[Point]:
    """Return known points, rounded to the digits that a chart shows."""
    return [
        (round(at - start, 2), _short(value))
        for at, value in values
        if value is not None and math.isfinite(value) and math.isfinite(at)
    ]


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def chart_data(charts: Mapping[str, Chart]) -> Markup:
    """Return charts by name as JSON for a page; no text in them can close the element around it.

    Example:
        >>> picture = ScatterChart("</script>", ("x", "y"), [])
        >>> "</script>" in chart_data({"a": picture})
        False
    """
    text = json.dumps(charts, default=_fields, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704  # nothing in it is markup


def _fields(chart: object) -> dict[str, Any]:
    return {name: value for name, value in vars(chart).items() if value is not None}


def chart_scripts() -> list[Markup]:
    """Return the scripts of a page with charts: the library and the modules that use it."""
    folder = resources.files(__package__)
    library = folder.joinpath("vendor", LIBRARY).read_text(encoding="utf-8")
    modules = [folder.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS]
    return [Markup(library), Markup('"use strict";\n' + "".join(map(_inlined, modules)))]  # noqa: S704  # files of ours


def _inlined(module: str) -> str:
    """Return a module as a part of one script, in which all names share a scope."""
    lines = [line for line in module.splitlines() if not line.startswith(("import ", "//"))]
    return "".join(line.removeprefix("export ") + "\n" for line in lines)
