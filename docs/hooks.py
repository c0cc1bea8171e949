"""What `mkdocs build` adds to the pages of this folder: those of the benchmarks."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.generate import benchmarks

CLAIMS = "<!-- claims -->"
API = re.compile(r"\[([^\]]+)\]\((\.\./api/[^)]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the benchmarks into the navigation."""
    (section,) = (entry for entry in config.nav or [] if "Benchmarks" in entry)
    pages = [{benchmarks.title(name): f"benchmarks/{name}.md"} for name in benchmarks.names()]
    section["Benchmarks"] = [*section["Benchmarks"], *pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the benchmarks."""
    for name in benchmarks.names():
        path = f"benchmarks/{name}.md"
        files.append(File.generated(config, path, content=benchmarks.page(name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the table of claims into its place, and hide links to the API from the check of links.

    `docs/api.py` writes those pages after this build; tests/project/test_site.py checks the links.
    """
    markdown = markdown.replace(CLAIMS, "\n".join(benchmarks.claims()))
    return API.sub(r'<a href="\2">\1</a>', markdown)
