"""Reading a report as its reader would: text per section, tables, what pictures are drawn from."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """What a reader gets: text per section, tables; checks that tags are balanced."""

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
        if self.open[-1:] in (["script"], ["style"]):
            return
        self.sections[self._section] = self.sections.get(self._section, "") + data

    def text(self, section: str) -> str:
        return " ".join(self.sections[section].replace("\u202f", " ").split())


def charts(html: str) -> dict[str, Any]:
    """Return what the page's pictures are drawn from, by name; each has one place."""
    found = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', html)
    assert len(found) == 1
    data: dict[str, Any] = json.loads(found[0])
    assert sorted(re.findall(r'data-chart="([^"]+)"', html)) == sorted(data)
    return data
