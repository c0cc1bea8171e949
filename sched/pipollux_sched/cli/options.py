"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from pipollux_protocol.environment import CA_FILE

from .completion import complete_jobs, complete_nodes, complete_policies
from .console import LineFormat, OutputFormat, TextFormat

StateDirectory: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        envvar="PIPOLLUX_STATE_DIR",
        metavar="DIR",
        help="Where the scheduler keeps everything.",
        show_default="~/.local/state/pipollux",
    ),
]

ServerUrl: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--server",
        envvar="PIPOLLUX_SERVER",
        metavar="URL",
        help="The scheduler to ask, which may run on another machine.",
        show_default="that of the state directory",
    ),
]

TokenFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="PIPOLLUX_TOKEN_FILE",
        metavar="FILE",
        help="Holds the token for that scheduler, the admin's or a user's.",
        show_default="what PIPOLLUX_TOKEN says",
    ),
]

AuthorityFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        envvar=CA_FILE.name,
        metavar="FILE",
        help="Certificates of the authorities to trust for it.",
        show_default="those of the system",
    ),
]

ClusterFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        "-c",
        metavar="FILE",
        help="YAML: the nodes that there are.",
        show_default="this machine: a slot for each GPU, else each CPU",
    ),
]


SomeClusterFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        "-c",
        metavar="FILE",
        help="YAML: the nodes that there are.",
        show_default="the scheduler's own",
    ),
]


def _known_policy(name: str | None) -> str | None:
    if name is not None:
        from pipollux_policies import POLICIES, make_policy  # slow, and --help needs neither

        if name not in POLICIES:
            try:
                make_policy(name)
            except ValueError as error:
                raise typer.BadParameter(str(error).removeprefix("policy: ")) from None
    return name


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
        help="Variable of this environment that all jobs get, too; may be given again.",
        show_default=False,
        callback=_passable,
    ),
]

Fairness: TypeAlias = Annotated[
    float | None,
    typer.Option(
        metavar="F",
        min=1.0,
        help="Promise that no job ends later than F times as late as on an equal share, where that "
        "can be; by the policy exact.",
        show_default="no promise",
    ),
]

Scarcity: TypeAlias = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        min=0.0,
        help="Share of what jobs that run on several types of GPU are charged for making those "
        "wait that run on one only; by the policy exact.",
        show_default="0.7",
    ),
]

MOST_TAIL = 10.0
"""That of `policy.CompletionTime`, whose import would make every command slow."""

Tail: TypeAlias = Annotated[
    float | None,
    typer.Option(
        metavar="Q",
        min=0.0,
        max=MOST_TAIL,
        help="How much more late jobs count: completion times to the power 1 + Q are kept short, "
        "1 their squares; by the policy exact.",
        show_default="0, and 0.6 where a type of GPU is scarce",
    ),
]

RankPower: TypeAlias = Annotated[
    float | None,
    typer.Option(
        metavar="A",
        min=0.0,
        max=1.0,
        help="How much more short jobs count: near 1 the average completion time is short, near 0 "
        "jobs share the cluster and the last of them ends sooner; by the policy exact.",
        show_default="0.28",
    ),
]

PolicyName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="NAME",
        callback=_known_policy,
        autocompletion=complete_policies,
        help="Allocation policy: pollux, exact, fifo, tiresias, optimus or sia.",
        show_default="the scheduler's own",
    ),
]

SomeJobsFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--jobs",
        "-j",
        metavar="FILE",
        help="YAML: the jobs that want them.",
        show_default="the scheduler's own",
    ),
]

JobName: TypeAlias = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the job.", autocompletion=complete_jobs)
]

JobNames: TypeAlias = Annotated[
    list[str],
    typer.Argument(metavar="NAME...", help="Names of jobs.", autocompletion=complete_jobs),
]

NodeName: TypeAlias = Annotated[
    str, typer.Argument(metavar="NODE", help="Name of the node.", autocompletion=complete_nodes)
]

TableOutput: TypeAlias = Annotated[
    OutputFormat, typer.Option("--output", "-o", help="How to print it.")
]

TextOutput: TypeAlias = Annotated[
    TextFormat, typer.Option("--output", "-o", help="How to print it.")
]

LineOutput: TypeAlias = Annotated[
    LineFormat, typer.Option("--output", "-o", help="How to print it; json: one object a line.")
]
