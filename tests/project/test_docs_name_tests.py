"""What the documentation says a test proves: that test is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
_FUNCTIONS = set(re.findall(r"^ *def (test_\w+)", _TESTS, re.MULTILINE))
_FILES = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"`(?:[\w/]+/)?(test_\w+)(?:\.py)?`", page.read_text()))
    assert named <= _FUNCTIONS | _FILES


def test_every_row_of_what_dies_names_its_proof() -> None:
    text = (ROOT / "docs" / "operating.md").read_text()
    table = text.partition("## When something dies")[2].partition("\n\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    assert [row for row in rows if "`test_" not in row and "| the same |" not in row] == []
