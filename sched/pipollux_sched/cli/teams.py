"""`pipollux teams`: list teams and their usage, and set their quotas."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipollux_utils.text import DASH, count, spell_moment

from .console import USAGE, CommandError, TextFormat, print_data, print_result
from .options import StateDirectory, TextOutput
from .reader import asking, reading, tell_unserved

if TYPE_CHECKING:
    from rich.table import Table

    from pipollux_sched.views.teams import TeamsView


def teams(
    set_file: Annotated[
        Path | None,
        typer.Option(
            "--set",
            metavar="FILE",
            help="Replace all teams by the teams of this file.",
            show_default=False,
        ),
    ] = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove all teams, so that all users share all slots.")
    ] = False,
    output: TextOutput = TextFormat.text,
    state_dir: StateDirectory = None,
) -> None:
    """List teams: quota, slots used, borrowed and lent, running and waiting jobs.

    Without a running scheduler, teams shows the last recorded state; --set and
    --clear need a running scheduler.

        pipollux teams
        pipollux teams --set teams.yaml

    Exit code: 0 done; 1 refused; 2 the file or an option is invalid.
    """
    if set_file is not None and clear:
        raise CommandError("--set and --clear contradict each other; give one of them", USAGE)
    if set_file is None and not clear:
        with reading(state_dir) as reader:
            _print(reader.teams(), output)
            tell_unserved(reader)
        return
    from pipollux_sched.spec.teams import load_teams

    spec = None if set_file is None else load_teams(set_file)
    with asking(state_dir) as client:
        _print(client.set_teams(spec), output)


def _print(found: TeamsView, output: TextFormat) -> None:
    if output is not TextFormat.text:
        print_data(found.to_dict(), output)
    elif not found.configured:
        typer.echo("No teams: all users share all slots. Set some with: pipollux teams --set FILE")
    else:
        print_result(team_table(found))
        typer.echo(f"{count(len(found.teams), 'team')}, {spell_use(found)}.")


def spell_use(found: TeamsView) -> str:
    """Spell how many slots teams use, and whether the quotas exceed the slots."""
    used = sum(team.used for team in found.teams)
    quotas = sum(team.quota for team in found.teams)
    text = f"{count(used, 'slot')} used"
    if quotas <= found.slots:
        return text
    return f"{text}; the quotas are {quotas} of {count(found.slots, 'slot')}: each gets its part"


def team_table(found: TeamsView) -> Table:
    """Return the teams and their usage as a table."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    words = ("Team", "Waiting", "Gives back")
    for header in (
        *("Team", "Quota", "Used", "Borrowed", "Lent", "Weight", "Jobs"),
        *("Submitted", "Waiting", "Gives back"),
    ):
        table.add_column(header, justify="left" if header in words else "right")
    for team in found.teams:
        table.add_row(
            team.name,
            str(team.quota),
            str(team.used),
            limited(team.borrowed, team.borrow),
            limited(team.lent, team.lend),
            f"{team.weight:g}",
            limited(len(team.running), team.max_jobs),
            limited(team.submitted, team.max_submit_jobs),
            ", ".join(team.waiting) or DASH,
            spell_moment(team.until),
        )
    return table


def limited(number: int, limit: int | None) -> str:
    """Return a number and its limit.

    Example:
        >>> limited(2, None), limited(2, 3)
        ('2', '2 of 3')
    """
    return str(number) if limit is None else f"{number} of {limit}"
