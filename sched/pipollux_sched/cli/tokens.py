"""`pipollux tokens`: tokens of users, with their roles."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from pipollux_sched.spec.tokens import NewToken, Role
from pipollux_utils.text import DASH, spell_age

from .console import USAGE, CommandError, OutputFormat, print_data, print_result
from .options import StateDirectory, TableOutput
from .reader import asking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from pipollux_sched.views.tokens import TokenView


class TokenAction(StrEnum):
    """Actions on tokens."""

    list = "list"
    create = "create"
    revoke = "revoke"


def tokens(
    action: Annotated[
        TokenAction, typer.Argument(metavar="[list|create|revoke]", show_default=False)
    ] = TokenAction.list,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of the user.", show_default=False)
    ] = None,
    role: Annotated[Role, typer.Option(help="Role of the user.")] = Role.USER,
    team: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Team of all the user's jobs.", show_default="any team of the user"
        ),
    ] = None,
    run_as: Annotated[
        str | None,
        typer.Option(
            metavar="USER",
            help="System user that the jobs run as; needs a scheduler that runs as root.",
            show_default="the scheduler's user",
        ),
    ] = None,
    output: TableOutput = OutputFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """List, create and revoke the tokens of users.

    A viewer reads everything; a user also submits and manages own jobs; an admin
    may do everything. A token is printed once; the scheduler keeps only its digest.

    With the local and Slurm backends, jobs have all permissions of the system user
    that they run as. Without --run-as, this is the user of the scheduler; give
    tokens without --run-as only to people whom you trust as admins.

        pipollux tokens create ana --role user --team vision --run-as ana
        pipollux tokens revoke ana

    Exit code: 0 done; 1 refused; 2 an option is invalid.
    """
    if (name is None) != (action is TokenAction.list):
        wanted = "takes no NAME" if name else "needs the NAME of a user"
        raise CommandError(f"pipollux tokens {action} {wanted}", USAGE)
    with asking(state_dir) as client:
        if name is None:
            _print(client.tokens(), output)
        elif action is TokenAction.revoke:
            gone = client.revoke_token(name)
            _tell(f"{gone.name}: the token is revoked.", gone.to_dict(), output)
        else:
            made = client.create_token(_new(name, role, team, run_as))
            if made.note:
                typer.echo(f"Warning: {made.note}", err=True)
            _tell(made.token, made.to_dict(), output)


def _new(name: str, role: Role, team: str | None, run_as: str | None) -> NewToken:
    from pydantic import ValidationError

    from pipollux_utils.validation import problems

    try:
        return NewToken(name=name, role=role, team=team, run_as=run_as)
    except ValidationError as error:
        found = problems(error.errors(include_url=False), NewToken)
        raise CommandError("; ".join(one.sentence() for one in found), USAGE) from None


def _tell(text: str, data: dict[str, object], output: OutputFormat) -> None:
    if output is OutputFormat.table:
        typer.echo(text)
    else:
        print_data(data, output)


def _print(found: Sequence[TokenView], output: OutputFormat) -> None:
    if output is not OutputFormat.table:
        print_data([token.to_dict() for token in found], output)
    elif not found:
        typer.echo("No tokens but the admin's; make one with: pipollux tokens create NAME")
    else:
        print_result(_table(found))


def _table(found: Sequence[TokenView]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in ("User", "Role", "Team", "Runs as", "Made"):
        table.add_column(header)
    for token in found:
        age = spell_age(time.time() - token.created_at)
        table.add_row(
            token.name, token.role.value, token.team or DASH, token.run_as or DASH, f"{age} ago"
        )
    return table
