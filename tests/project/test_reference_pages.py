"""Generated pages of the reference are those that the code gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.generate.notes import Notes
from docs.generate.pages import FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_generated(name: str) -> None:
    page = (FOLDER / name).read_text(encoding="utf-8")
    assert page == PAGES[name](), f"docs/reference/{name} is out of date; run: make reference"


def test_a_note_without_a_place_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "x.notes.md").write_text("About.\n<!-- one -->\nText.\n<!-- two -->\nMore.\n")
    monkeypatch.setattr("docs.generate.notes.__file__", str(tmp_path / "notes.py"))
    notes = Notes("x")
    assert notes.lines("one") == ["", "Text."]
    assert notes.lines("three") == []
    with pytest.raises(ValueError, match=r"unknown sections \['two'\]"):
        notes.close()
