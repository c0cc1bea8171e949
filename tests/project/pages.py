"""The pages of the documentation, their links, headings and fenced blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^(?P<indent> *)(?P<mark>`{3,}|~{3,}) *(?P<language>[\w+-]*)(?P<more>[^\n`]*)$")
HEADING = re.compile(r"^#{1,6} +(.+?)(?: +\{#([\w-]+)\})?$")
ANCHOR = re.compile(r'<a id="([^"]+)"|<a name="([^"]+)"| id="([^"]+)"')
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    runs: bool
    """Whether the line before it is `<!-- run -->`: a test runs it."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


class _Loader(yaml.SafeLoader):
    """Reads `mkdocs.yml`, in which Python names may stand."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def configuration() -> dict[str, Any]:
    """`mkdocs.yml`."""
    loaded = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)  # noqa: S506  # a safe loader
    assert isinstance(loaded, dict)
    return loaded


def in_navigation(entry: Any = None) -> list[str]:
    """Every page of the navigation, relative to `docs`."""
    entry = configuration()["nav"] if entry is None else entry
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in in_navigation(part)]


def site_pages() -> list[Path]:
    """Pages of the site that are files of `docs`."""
    return [DOCS / name for name in in_navigation()]


def benchmark_pages() -> list[Path]:
    """Pages of the site that are made of a benchmark's README."""
    return sorted((ROOT / "benchmarks").glob("*/README.md"))


def blocks_of(page: Path) -> Iterator[Block]:
    """Every fenced block of a page.

    Raises:
        ValueError: one is not closed.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opened = FENCE.match(lines[number])
        if opened:
            end = f"{opened['indent']}{opened['mark']}"
            try:
                last = lines.index(end, number + 1)
            except ValueError:
                raise ValueError(f"{page}:{number + 1}: a block that is not closed") from None
            cut = len(opened["indent"])
            text = "\n".join(line[cut:] for line in lines[number + 1 : last])
            before = next((x.strip() for x in reversed(lines[:number]) if x.strip()), "")
            runs = before == "<!-- run -->"
            yield Block(page, number + 1, opened["language"], text, runs)
            number = last
        number += 1


def prose_of(page: Path) -> str:
    """A page without its fenced blocks."""
    text = page.read_text(encoding="utf-8")
    for block in blocks_of(page):
        text = text.replace(block.text, "", 1) if block.text else text
    return text


def anchors_of(text: str) -> set[str]:
    """The anchors of a page as GitHub and MkDocs make them."""
    found = {name for names in ANCHOR.findall(text) for name in names if name}
    counts: dict[str, int] = {}
    for line in text.splitlines():
        heading = HEADING.match(line)
        if heading:
            plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
            for name in {heading[2] or slug, re.sub(r"-{2,}", "-", slug).strip("-")}:
                times = counts.get(name, 0)
                counts[name] = times + 1
                found.add(f"{name}-{times}" if times else name)
    return found
