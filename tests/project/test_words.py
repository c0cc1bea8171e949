"""The documentation and the help of the command line use the terms of the glossary."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipollux_sched.cli.app import COMMANDS, app, load_command
from tests.project import pages

PATTERNS = {
    r"\bnewcomers?\b": "joining replica",
    r"\blive changes?\b": "elastic resize",
    r"\bchang(?:es?|ed) live\b": "elastic resize",
    r"\b(?:those|who) that stay\b": "surviving replicas",
    r"\bparked\b": "waiting to join",
    r"\bmeeting (?:place|folder)\b": "rendezvous",
    r"\bbulletin\b": "job announcement",
    r"\bas ever\b": "always",
    r"\banew\b": "again",
    r"\bto a replica\b": "per replica",
    r"\b(?:told|not told) lengths\b": "known lengths",
    r"\bsigns? of life\b": "heartbeat",
}
"""What to avoid, and what to write."""
GENERATED = {
    "reference/rest.md",
    "reference/protocol.md",
    "reference/cli.md",
    "reference/python.md",
}
"""Pages with texts of the code, which are checked where they are written by hand."""


def wrong_words(text: str) -> list[str]:
    found = []
    for pattern, better in PATTERNS.items():
        for match in re.finditer(pattern, " ".join(text.split()), re.IGNORECASE):
            found.append(f"{match[0]!r}: write {better!r}")
    return found


def hand_written() -> list[Path]:
    notes = sorted((pages.DOCS / "generate").glob("*.notes.md"))
    site = [x for x in pages.site_pages() if str(x.relative_to(pages.DOCS)) not in GENERATED]
    return [pages.ROOT / "README.md", *site, *notes]


@pytest.mark.parametrize("page", hand_written(), ids=lambda page: str(page.relative_to(pages.ROOT)))
def test_pages_use_the_terms(page: Path) -> None:
    """In prose: blocks show what commands print."""
    assert wrong_words(pages.prose_of(page)) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_uses_the_terms(name: str) -> None:
    command = load_command(name)
    text = " ".join([COMMANDS[name].summary, command.help, *(x.help or "" for x in command.params)])
    assert wrong_words(text) == []


def test_the_help_of_all_commands_uses_the_terms() -> None:
    from typer.main import get_command

    command = get_command(app)
    text = " ".join([command.help or "", *(x.help or "" for x in command.params)])
    assert wrong_words(text) == []


def test_wrong_words_are_found() -> None:
    assert len(wrong_words("A newcomer\nparked as\never, for live changes.")) == 4
