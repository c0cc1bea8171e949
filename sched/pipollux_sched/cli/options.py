"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

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

ClusterFile: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--cluster",
        "-c",
        metavar="FILE",
        help="YAML: the nodes that there are.",
        show_default=False,
    ),
]


def _known_policy(name: str | None) -> str | None:
    if name is not None:
        from pipollux_sched.policy import POLICIES, make_policy  # slow, and --help needs neither

        if name not in POLICIES:
            try:
                make_policy(name)
            except ValueError as error:
                raise typer.BadParameter(str(error).removeprefix("policy: ")) from None
    return name


PolicyName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="NAME",
        callback=_known_policy,
        help="Who decides: pollux, exact, fifo, tiresias, optimus or sia.",
        show_default="the scheduler's own",
    ),
]

JobsFile: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--jobs",
        "-j",
        metavar="FILE",
        help="YAML: the jobs that want them.",
        show_default=False,
    ),
]
