"""The page of the command line has every command and option, and an example of each command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipollux_sched.cli.app import COMMANDS, app, load_command
from pipollux_sched.planning.explain import LimitKind
from pipollux_sched.report.event_text import EVENT_TYPES

ALWAYS = {"--help", "-h"}


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs/reference/cli.md").read_text(encoding="utf-8")


def section(page: str, name: str) -> str:
    found = re.search(rf"(?ms)^## {name}\n(.*?)(?=^## |\Z)", page)
    assert found, f"docs/reference/cli.md has no section '## {name}'"
    return found[1]


def options(name: str) -> set[str]:
    """Every spelling of every option of a command."""
    params = [param for param in load_command(name).params if param.param_type_name == "option"]
    return {spelling for param in params for spelling in (*param.opts, *param.secondary_opts)}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_told(page: str, name: str) -> None:
    told = section(page, name) + section(page, "Shared options")
    assert [one for one in options(name) - ALWAYS if f"`{one}`" not in told] == []
    assert re.search(rf"(?m)^\$ pipollux {name}\b", page)


def test_options_of_all_commands_are_told(page: str) -> None:
    from typer.main import get_command

    spellings = {s for param in get_command(app).params for s in param.opts} - ALWAYS
    assert spellings >= {"--version", "--install-completion", "--show-completion"}
    assert [one for one in spellings if f"`{one}`" not in page] == []


def test_types_of_events_and_limits_are_told(page: str) -> None:
    told = section(page, "events")
    assert [kind for kind in EVENT_TYPES if f"`{kind}`" not in told] == []
    told = section(page, "explain")
    assert [kind.value for kind in LimitKind if f"`{kind.value}`" not in told] == []
