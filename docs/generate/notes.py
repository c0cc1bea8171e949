"""Hand-written parts of generated pages: facts that the code does not carry.

`docs/generate/NAME.notes.md` has sections, each after a line `<!-- place -->`; a generator puts
each into its place.
"""

from __future__ import annotations

import re
from pathlib import Path


class Notes:
    """The sections of one file; `close` fails if a section was not used.

    Args:
        name: name of the page, such as "cli".
    """

    def __init__(self, name: str) -> None:
        path = Path(__file__).with_name(f"{name}.notes.md")
        parts = re.split(r"^<!-- (.+) -->\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        self._path = path
        self._sections = {
            head: text.strip() for head, text in zip(parts[1::2], parts[2::2], strict=True)
        }
        self._unused = set(self._sections)

    def lines(self, heading: str) -> list[str]:
        """Return a section after an empty line; nothing if there is none."""
        self._unused.discard(heading)
        text = self._sections.get(heading)
        return [] if text is None else ["", *text.splitlines()]

    def close(self) -> None:
        """Fail if a section has no place on the page.

        Raises:
            ValueError: so.
        """
        if self._unused:
            raise ValueError(f"{self._path}: unknown sections {sorted(self._unused)}")
