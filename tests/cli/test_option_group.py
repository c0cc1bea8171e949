"""Options that a command gets as one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from pipollux_sched.cli.app import load_command
from pipollux_sched.cli.option_group import flag_of, text_option, with_groups


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where."""

    panel: ClassVar[str] = "Place"

    host: Annotated[str, typer.Option(help="Which machine.")] = "here"
    where: Annotated[str | None, text_option("--there", "NAME", "Which room.", "any")] = None


@dataclass(frozen=True, kw_only=True)
class People:
    """Who; a field is called as the parameter of the other group is."""

    panel: ClassVar[str] = "People"

    place: Annotated[list[str] | None, typer.Option("--seat", help="Who sits.")] = None


@with_groups
def meet(
    when: Annotated[int, typer.Option(help="The hour.")] = 9, *, place: Place, who: People
) -> None:
    """Print what was given."""
    print(when, place, who)


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(meet)
    return app


def test_every_group_gets_its_own_options(app: typer.Typer) -> None:
    given = ["--when", "7", "--there", "hall", "--seat", "a", "--seat", "b"]
    found = CliRunner().invoke(app, given).stdout
    assert found == f"7 {Place(where='hall')} {People(place=['a', 'b'])}\n"
    assert CliRunner().invoke(app, []).stdout == f"9 {Place()} {People()}\n"
    assert CliRunner().invoke(app, ["--elsewhere"]).exit_code == 2


def test_the_option_of_a_field() -> None:
    assert (flag_of(Place, "where"), flag_of(People, "place")) == ("--there", "--seat")


def test_each_option_of_serve_is_under_a_heading() -> None:
    command = load_command("serve")
    headings: dict[str | None, int] = {}
    for one in command.params:
        headings[one.rich_help_panel] = headings.get(one.rich_help_panel, 0) + 1
    assert headings.keys() == {
        None,
        "Cluster",
        "Policy",
        "Jobs",
        "Server and TLS",
        "With --backend kubernetes",
        "With --backend ray",
        "With --backend slurm",
    }
    assert headings[None] <= 3
