"""Pages of the site from `benchmarks/*/README.md`: the same text with links of the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from pipollux_protocol.reference import table

ROOT = Path(__file__).parents[2]
FOLDER = "benchmarks"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def names() -> list[str]:
    """Return the folders of benchmarks that have a README."""
    return sorted(path.parent.name for path in (ROOT / FOLDER).glob("*/README.md"))


def title(name: str) -> str:
    """Return a short title for the navigation."""
    return {"jct": "Job completion time", "gpu": "GPU"}.get(
        name, name.replace("-", " ").capitalize()
    )


def claim(name: str) -> str:
    """Return the first heading of a benchmark: what it shows."""
    return _read(name).partition("\n")[0].removeprefix("# ").strip()


def page(name: str) -> str:
    """Return the page of a benchmark."""
    return LINK.sub(lambda link: _rewritten(name, *link.groups()), _read(name))


def claims() -> Iterator[str]:
    """Yield a table of all benchmarks."""
    rows = [(f"[{title(name)}]({name}.md)", claim(name)) for name in names()]
    yield from table(("benchmark", "result"), rows)


def _read(name: str) -> str:
    return (ROOT / FOLDER / name / "README.md").read_text(encoding="utf-8")


def _rewritten(name: str, text: str, target: str, anchor: str | None) -> str:
    """Return a link of a README as a link of its page, or its text if it leads to other files."""
    anchor = anchor or ""
    if not target or ":" in target:
        return f"[{text}]({target}{anchor})"
    path = posixpath.normpath(posixpath.join(FOLDER, name, target))
    other = re.fullmatch(rf"{FOLDER}/([^/]+)/README\.md", path)
    if other:
        return f"[{text}]({other[1]}.md{anchor})"
    if not path.startswith("docs/"):
        return text
    return f"[{text}](../{path.removeprefix('docs/')}{anchor})"
