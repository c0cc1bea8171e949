"""SVG, as little of it as the charts need; colours and fonts come from the page's style sheet.

Every element is built as an element, never as a string, so that whatever a user called a job is
escaped. A drawing carries a name that is unique in the page and prefixes its ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

from markupsafe import Markup

from pipollux_sched.utils.text import clean

WIDTH = 1000.0
"""Units across every chart of the page; the style sheet scales them to the column."""

NUM_COLOURS = 8
"""Job colours in the style sheet; more jobs start over."""


def colour_class(index: int) -> str:
    """Return the class that gives a chart element the colour of job number `index`."""
    return f"job-{index % NUM_COLOURS}"


def text_width(text: str, size: float = 13.0) -> float:
    """Return about how wide `text` is set at `size`: enough to keep labels apart."""
    return sum(0.33 if c in " .,:;|!ijl'()[]" else 0.58 for c in text) * size


class Drawing:
    """One SVG picture of `width` × `height` units.

    Args:
        name: prefix of its ids, unique in the page.
        height: units from top to bottom.
        title: what a reader who cannot see it is told.
        width: units from left to right.

    Example:
        >>> drawing = Drawing("d", 20, "A line")
        >>> drawing.line(0, 0, 10, 10, "axis")
        >>> 'class="axis"' in drawing.markup()
        True
    """

    def __init__(self, name: str, height: float, title: str, width: float = WIDTH) -> None:
        self.name = name
        self._root = ElementTree.Element(
            "svg",
            {
                "class": "chart",
                "viewBox": f"0 0 {_n(width)} {_n(height)}",
                "role": "img",
                "aria-labelledby": f"{name}-title",
            },
        )
        heading = ElementTree.SubElement(self._root, "title", {"id": f"{name}-title"})
        heading.text = clean(title)

    def hatch(self, colour: int) -> str:
        """Define the hatching in the colour of a job; return its id for `rect(fill=…)`."""
        ident = f"{self.name}-hatch-{colour % NUM_COLOURS}"
        if self._root.find(f".//pattern[@id='{ident}']") is None:
            pattern = ElementTree.SubElement(
                self._root,
                "pattern",
                {
                    "id": ident,
                    "width": "6",
                    "height": "6",
                    "patternUnits": "userSpaceOnUse",
                    "patternTransform": "rotate(45)",
                },
            )
            shade = colour_class(colour)
            whole = {"width": "6", "height": "6", "class": f"hatch-ground {shade}"}
            ElementTree.SubElement(pattern, "rect", whole)
            line = {"width": "1.6", "height": "6", "class": f"hatch-line {shade}"}
            ElementTree.SubElement(pattern, "rect", line)
        return ident

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        css: str,
        *,
        tip: str = "",
        radius: float = 0.0,
        fill: str = "",
    ) -> None:
        """Draw a rectangle; `fill` is the id of a hatching, `tip` what hovering says."""
        attributes = {
            "x": _n(x),
            "y": _n(y),
            "width": _n(max(0.0, width)),
            "height": _n(max(0.0, height)),
            "class": css,
        }
        if radius:
            attributes["rx"] = _n(radius)
        if fill:
            attributes["fill"] = f"url(#{fill})"
        self._add("rect", attributes, tip)

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        """Draw a straight line."""
        ends = {"x1": _n(x1), "y1": _n(y1), "x2": _n(x2), "y2": _n(y2)}
        self._add("line", {**ends, "class": css})

    def path(
        self, points: Iterable[tuple[float, float]], css: str, *, closed: bool = False
    ) -> None:
        """Draw a line through `points`, or the area inside of them when `closed`."""
        corners = [f"{_n(x)},{_n(y)}" for x, y in points]
        if len(corners) > 1:
            tail = "Z" if closed else ""
            self._add("path", {"d": "M" + "L".join(corners) + tail, "class": css})

    def circle(self, x: float, y: float, radius: float, css: str, *, tip: str = "") -> None:
        """Draw a dot."""
        self._add("circle", {"cx": _n(x), "cy": _n(y), "r": _n(radius), "class": css}, tip)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        css: str = "label",
        *,
        at: str = "start",
        tail: str = "",
    ) -> None:
        """Write `words` with the baseline at `y`; `at` is start, middle or end of them at `x`.

        `words` are strong when a `tail` follows, a little way off.
        """
        attributes = {"x": _n(x), "y": _n(y), "class": css}
        if at != "start":
            attributes["text-anchor"] = at
        element = self._add("text", attributes)
        if not tail:
            element.text = clean(words)
            return
        ElementTree.SubElement(element, "tspan", {"class": "strong"}).text = clean(words)
        ElementTree.SubElement(element, "tspan", {"dx": "9"}).text = clean(tail)

    def markup(self) -> Markup:
        """Return the picture for the page."""
        return Markup(ElementTree.tostring(self._root, encoding="unicode"))  # noqa: S704  # ElementTree has escaped it

    def _add(self, tag: str, attributes: dict[str, str], tip: str = "") -> ElementTree.Element:
        element = ElementTree.SubElement(self._root, tag, attributes)
        if tip:
            ElementTree.SubElement(element, "title").text = clean(tip)
        return element


def _n(value: float) -> str:
    """Write a coordinate with two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"
