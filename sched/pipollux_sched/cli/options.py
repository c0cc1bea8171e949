"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from pipollux_protocol.environment import CA_FILE

from .completion import complete_jobs, complete_nodes, complete_policies
from .console import LineFormat, OutputFormat, TextFormat, shortened
from .server_choice import TOKEN_FILE_VARIABLE

StateDirectory: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        envvar="PIPOLLUX_STATE_DIR",
        metavar="DIR",
        help="State directory of the scheduler.",
        show_default="~/.local/state/pipollux",
    ),
]

ServerUrl: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--server",
        envvar="PIPOLLUX_SERVER",
        metavar="URL",
        help="URL of the scheduler, which may run on another machine.",
        show_default="that of the state directory",
    ),
]

TokenFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar=TOKEN_FILE_VARIABLE,
        metavar="FILE",
        help="File with the token for the scheduler: the admin's or a user's.",
        show_default="the value of PIPOLLUX_TOKEN",
    ),
]

AuthorityFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        envvar=CA_FILE.name,
        metavar="FILE",
        help="Certificates of the authorities to trust for the connection.",
        show_default="those of the system",
    ),
]


def _input_file(flag: str, short: str, contents: str, default: str) -> Any:
    return typer.Option(
        flag, short, metavar="FILE", help=f"YAML: {contents}.", show_default=default
    )


ClusterFile: TypeAlias = Annotated[
    Path | None,
    _input_file(
        "--cluster",
        "-c",
        "the nodes of the cluster",
        "this machine, with a slot per GPU, else per CPU",
    ),
]

SomeClusterFile: TypeAlias = Annotated[
    Path | None, _input_file("--cluster", "-c", "the nodes of the cluster", "the scheduler's own")
]


def _known_policy(policy: str | None) -> str | None:
    if policy is not None:
        from pipollux_policies import parse_policy  # slow

        try:
            parse_policy(policy)
        except ValueError as error:
            raise typer.BadParameter(str(error).removeprefix("policy: ")) from None
    return policy


def _passable(names: list[str] | None) -> list[str] | None:
    from pipollux_sched.spec.variables import check_name

    for name in names or ():
        try:
            check_name(name)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return names


PassEnvironment: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--pass-environment",
        metavar="NAME",
        help="Environment variable to pass to all jobs; may be repeated.",
        show_default=False,
        callback=_passable,
    ),
]

PolicyName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="NAME[:OPTION=VALUE,...]",
        callback=_known_policy,
        autocompletion=complete_policies,
        help="Allocation policy, with its options.",
        show_default="the scheduler's own",
    ),
]


def _dependencies(entries: list[str] | None) -> list[str] | None:
    from pipollux_sched.spec.dependencies import parse_dependency

    for entry in entries or ():
        try:
            parse_dependency(entry)
        except ValueError:
            raise typer.BadParameter(
                f"{shortened(entry, 80)!r} names no job to wait for; give its name, or NAME:WHEN, "
                "where WHEN is succeeded, failed or ended"
            ) from None
    return entries


After: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--after",
        metavar="JOB[:WHEN]",
        help="Start after this job has ended: succeeded, failed or ended; may be repeated.",
        show_default=False,
        callback=_dependencies,
        autocompletion=complete_jobs,
    ),
]

SomeJobsFile: TypeAlias = Annotated[
    Path | None, _input_file("--jobs", "-j", "the jobs to plan", "the scheduler's own")
]

JobName: TypeAlias = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the job.", autocompletion=complete_jobs)
]

JobNames: TypeAlias = Annotated[
    list[str],
    typer.Argument(metavar="NAME...", help="Names of the jobs.", autocompletion=complete_jobs),
]

NodeName: TypeAlias = Annotated[
    str, typer.Argument(metavar="NODE", help="Name of the node.", autocompletion=complete_nodes)
]

TableOutput: TypeAlias = Annotated[
    OutputFormat, typer.Option("--output", "-o", help="Output format.")
]

TextOutput: TypeAlias = Annotated[TextFormat, typer.Option("--output", "-o", help="Output format.")]

LineOutput: TypeAlias = Annotated[
    LineFormat, typer.Option("--output", "-o", help="Output format; json: one object per line.")
]
