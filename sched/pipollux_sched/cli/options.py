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
