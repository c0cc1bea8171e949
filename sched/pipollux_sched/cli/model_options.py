"""Options that `pipollux fit` and `pipollux predict` share."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from .console import USAGE, CommandError

if TYPE_CHECKING:
    from pipollux_perfmodel import GradParams

DEFAULT_CHUNKS = 2
"""The default of HybridParallel."""

InitBatchSize: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--init-batch-size",
        min=1,
        metavar="N",
        help="Initial batch size, at which statistical efficiency is 1.",
        show_default=False,
    ),
]
GradSqr: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--grad-sqr",
        min=0.0,
        metavar="X",
        help="Squared norm of the true gradient, |E g|².",
        show_default=False,
    ),
]
GradVar: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--grad-var",
        min=0.0,
        metavar="Y",
        help="Variance of the gradient of one batch of the initial size, E|g - E g|².",
        show_default=False,
    ),
]
ChunksPerStage: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--chunks-per-stage",
        min=2,
        metavar="V",
        help="Chunks of layers per stage in the interleaved schedule.",
        show_default=str(DEFAULT_CHUNKS),
    ),
]


class ScheduleName(StrEnum):
    """Pipeline schedules."""

    gpipe = "gpipe"
    one_f_one_b = "1f1b"
    interleaved = "interleaved"


def num_chunks(given: int | None, *, interleaved: bool) -> int:
    """Return the chunks per stage V; 1 without interleaving, where `given` is a `CommandError`."""
    if given is not None and not interleaved:
        raise CommandError(
            f"--chunks-per-stage is {given}, and only interleaved stages have chunks; give "
            "--schedule interleaved, or leave it out",
            USAGE,
        )
    return (given or DEFAULT_CHUNKS) if interleaved else 1


def grad_params(grad_sqr: float | None, grad_var: float | None) -> GradParams | None:
    """Return the gradient statistics, or None; `CommandError`: one is missing or not finite."""
    from pipollux_perfmodel import GradParams

    given = {"--grad-sqr": grad_sqr, "--grad-var": grad_var}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == 1:
        raise CommandError(f"{missing[0]} is missing; give both --grad-sqr and --grad-var", USAGE)
    for name, value in given.items():
        if value is not None and not math.isfinite(value):
            raise CommandError(f"{name} is {value}; give a finite number from 0 on", USAGE)
    if grad_sqr is None or grad_var is None:
        return None
    return GradParams(grad_sqr, grad_var)


def write_file(path: Path, option: str, content: bytes) -> None:
    """Write the file of an option atomically, and report it, or raise `CommandError`."""
    from pipollux_utils.atomic_write import write_output

    try:
        write_output(path, content)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CommandError(
            f"{path}: cannot be written ({reason}); "
            f"give {option} the path of a file that can be written"
        ) from error
    typer.echo(f"Wrote {path}", err=True)
