"""Reading a report as its reader would: text per section, tables, pictures."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """What a reader gets: text per section, tables, pictures; checks that tags are balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.sections: dict[str, str] = {}
        self.tags: set[str] = set()
        self._section = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "span":
            self.handle_data(" ")
        if ident := values.get("id"):
            self.ids.append(ident)
        if tag in ("section", "header", "footer"):
            self._section = values.get("id") or tag
        for name in ("src", "href", "xlink:href", "srcset", "data", "action"):
            if value := values.get(name):
                self.references.append(value)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("td", "th", "dt", "dd", "span"):
            self.handle_data(" ")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_data(self, data: str) -> None:
        self.sections[self._section] = self.sections.get(self._section, "") + data

    def text(self, section: str) -> str:
        return " ".join(self.sections[section].replace("\u202f", " ").split())


def pictures(html: str) -> dict[str, ElementTree.Element]:
    """Return the page's SVGs by name; each must be well-formed by itself."""
    found = {}
    for source in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        root = ElementTree.fromstring(source)  # noqa: S314  # a page that this test made
        found[root.attrib["aria-labelledby"].removesuffix("-title")] = root
    return found


def with_class(root: ElementTree.Element, tag: str, name: str) -> list[ElementTree.Element]:
    return [e for e in root.iter(tag) if name in e.attrib.get("class", "").split()]
