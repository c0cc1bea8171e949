"""`pipollux fit`: fit the performance model of a job to measured step times."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import OutputFormat, output_console, print_data
from .model_options import (
    ChunksPerStage,
    GradSqr,
    GradVar,
    InitBatchSize,
    ScheduleName,
    grad_params,
    num_chunks,
    write_file,
)
from .options import TableOutput

if TYPE_CHECKING:
    from pipollux_perfmodel import GradParams
    from pipollux_perfmodel.modeling.params_file import FitSummary
    from pipollux_perfmodel.timing.params import Checkpoint, ScheduleKind


class CheckpointMode(StrEnum):
    """Which micro-batches are recomputed in the backward."""

    never = "never"
    except_last = "except_last"
    always = "always"


def fit(
    measurements: Annotated[
        str,
        typer.Argument(
            metavar="MEASUREMENTS.jsonl",
            help="The measurements, one JSON object per line; - reads standard input.",
            show_default=False,
        ),
    ],
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="FILE", help="File to write the fit to, for pipollux predict."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Plot measured against predicted times: .png, .svg or .pdf."
        ),
    ] = None,
    output: TableOutput = OutputFormat.table,
    init_batch_size: InitBatchSize = None,
    grad_sqr: GradSqr = None,
    grad_var: GradVar = None,
    schedule: Annotated[
        ScheduleName, typer.Option(help="Pipeline schedule of the measurements.")
    ] = ScheduleName.gpipe,
    chunks_per_stage: ChunksPerStage = None,
    checkpoint: Annotated[
        CheckpointMode, typer.Option(help="Micro-batches that were recomputed in the measurements.")
    ] = CheckpointMode.never,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Skip invalid rows, and report them.")
    ] = False,
) -> None:
    r"""Fit the performance model of a job to measured step times.

    [bold]MEASUREMENTS.jsonl[/bold] has one measurement per line:

        {"num_nodes": 1, "num_replicas": 2, "atomic_bsz": 16,
         "accum_step_time": 0.081, "optim_step_time": 0.115}

    Each object is on one line. Times are in seconds, of one step or the mean of many steps.
    A pipeline also has num_stages and num_microbatches, and may have forward and backward: lists
    with the seconds of one micro-batch in each stage. Each num_stages is fitted separately.

    The output shows the parameters, the error of the fit in each regime, assumptions where
    measurements are missing, and outliers.

        pipollux fit examples/measurements.jsonl --checkpoint except_last --save params.json

    The saved fit includes --init-batch-size, --grad-sqr and --grad-var, from which
    pipollux predict computes efficiency and goodput.

    Exit code: 0 fitted; 1 the fit cannot be written; 2 a row or an option is
    invalid, and nothing was written.
    """
    from pipollux_perfmodel.modeling.arguments import picture_format

    gradients = grad_params(grad_sqr, grad_var)
    # Before the fit, so that an invalid file name fails at once.
    picture = picture_format(plot) if plot else ""
    chunks = num_chunks(chunks_per_stage, interleaved=schedule is ScheduleName.interleaved)
    run: tuple[Checkpoint, ScheduleKind, int] = checkpoint.value, schedule.value, chunks
    summary = _fit(measurements, run, skip_bad_rows=skip_bad_rows)
    content = _write(summary, save, init_batch_size, gradients)
    if plot is not None:
        from pipollux_perfmodel.modeling.plots import draw_fit

        write_file(plot, "--plot", draw_fit(summary.fits, picture))
    if output is OutputFormat.table:
        print_summary(summary)
    else:
        print_data(content, output)


def _fit(
    source: str, run: tuple[Checkpoint, ScheduleKind, int], *, skip_bad_rows: bool
) -> FitSummary:
    """Read and fit the rows; without `skip_bad_rows`, an invalid row is an error."""
    from pipollux_perfmodel.modeling.errors import ModelingError
    from pipollux_perfmodel.modeling.files import read_text
    from pipollux_perfmodel.modeling.fitting import fit_rows
    from pipollux_perfmodel.modeling.measurements import parse_rows
    from pipollux_perfmodel.modeling.params_file import FitSummary

    text, name = read_text(source)
    found = parse_rows(text, name)
    if found.bad and not (skip_bad_rows and found.rows):
        raise ModelingError(*found.bad)
    for problem in found.bad:
        typer.echo(f"Skipped: {problem}", err=True)
    return FitSummary(name, fit_rows(found.rows, *run), found.num_bad)


def _write(
    summary: FitSummary,
    save: Path | None,
    init_batch_size: int | None,
    gradients: GradParams | None,
) -> dict[str, Any]:
    from pipollux_perfmodel.modeling.params_file import to_json_object, to_text

    content = to_json_object(summary, init_batch_size, gradients)
    if save is not None:
        write_file(save, "--save", to_text(content).encode())
    return content


def print_summary(summary: FitSummary) -> None:
    """Print a fit as tables on standard output."""
    from .fit_table import print_fit, print_rows

    console = output_console()
    for one in summary.fits:
        print_fit(console, one)
    print_rows(console, summary)
