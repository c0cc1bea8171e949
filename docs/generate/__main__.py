"""Write all generated reference pages: `make reference`."""

from __future__ import annotations

from .pages import FOLDER, PAGES

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
