"""`pipollux simulate`: compare policies on a simulated cluster."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import OutputFormat, libraries_on_stderr, output_console, print_data
from .model_options import write_file
from .option_group import with_groups
from .simulate_inputs import SimulationInputs, input_errors
from .simulate_options import SimulatedClusterFlags, SimulatedJobFlags

if TYPE_CHECKING:
    from pipollux_simulator import SimulationOutcome

_RESULT = "The result"


@with_groups
def simulate(
    workloads: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[WORKLOAD.csv]...", help="Workloads of jobs.", show_default=False),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            "-p",
            metavar="NAME[:OPTION=VALUE,...],...",
            help="Policies, each with its options, or all.",
            show_default="the scheduler's",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed of policies, workloads, failures and spot.")
    ] = 0,
    processes: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of simulations to run in parallel.")
    ] = 1,
    output: Annotated[
        OutputFormat, typer.Option("--output", "-o", help="Output format.", rich_help_panel=_RESULT)
    ] = OutputFormat.table,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="HTML plots: completion times, GPU use and allocations.",
            rich_help_panel=_RESULT,
        ),
    ] = None,
    save_jobs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV: one row per job.", rich_help_panel=_RESULT),
    ] = None,
    *,
    cluster: SimulatedClusterFlags,
    jobs: SimulatedJobFlags,
) -> None:
    r"""Compare scheduling policies on a simulated cluster.

    [bold]A workload[/bold] is a CSV file in the format of the public Pollux workloads:

        name,time,application,num_replicas,batch_size
        cifar10-0,124,cifar10,2,1024

    Applications are cifar10, bert, imagenet, ncf, deepspeech2 and yolov3, from their
    traces, and the modelled pipelines gpt-1.3b, gpt-2.7b, gpt-6.7b and gpt-13b.

        pipollux simulate workload-1.csv --traces traces --policy exact,pollux
        pipollux simulate --generate pipelines --num-jobs 40 --nodes 8 --gpus 8
        pipollux simulate workload-1.csv --traces traces --policy exact,exact:tail=1

    [bold]With --from-state[/bold], the jobs are the history of a scheduler, which may be running.
    The result compares the real run with other policies, quotas or more nodes:

        pipollux simulate --from-state /var/lib/pipollux --policy exact,fifo
        pipollux simulate --from-state /var/lib/pipollux --add-nodes 10

    Every workload runs under every policy. JCT is the time from the arrival of a job to
    its completion. Fairness is the JCT over the JCT alone on an equal share of the
    GPUs; "Unfair to" is the share of jobs with a fairness above 1. Policy time is the
    wall-clock time of all decisions. For details see docs/howto/simulate.md.

    Exit code: 0 done; 1 a simulation failed; 2 a file or an option is invalid.
    """
    from pipollux_simulator import run_pairs

    from .simulation_progress import progress_bars

    with input_errors():
        inputs = SimulationInputs.read(workloads or (), policy, seed, cluster, jobs)
    with libraries_on_stderr(), progress_bars(inputs.pairs) as watch:
        simulated = run_pairs(inputs.experiment, inputs.pairs, watch, processes)
    outcomes = [*inputs.actual, *simulated]
    _print(outcomes, inputs, output)
    if plot is not None:
        from pipollux_sched.report.simulation.page import render_plots

        write_file(plot, "--plot", render_plots(outcomes).encode())
    if save_jobs is not None:
        write_file(save_jobs, "--save-jobs", _job_table(outcomes).encode())


def _print(
    outcomes: Sequence[SimulationOutcome], inputs: SimulationInputs, output: OutputFormat
) -> None:
    from pipollux_simulator import measure, measure_teams

    rows, past = [measure(one) for one in outcomes], inputs.past
    simulated = outcomes[len(inputs.actual) :]
    if output is not OutputFormat.table:
        found: list[dict[str, Any]] = [row.to_dict() for row in rows]
        if inputs.experiment.options.teams is not None:
            for row, outcome in zip(found, outcomes, strict=True):
                row["teams"] = [team.to_dict() for team in measure_teams(outcome)]
        if past is not None:
            found[0] |= past.to_dict(simulated)
        print_data(found, output)
        return
    from pipollux_sched.report.simulation.table import metrics_table, teams_table

    output_console().print(metrics_table(rows))
    teams = teams_table(outcomes)
    if teams is not None:
        output_console().print(teams)
    for line in () if past is None else past.footer(simulated):
        typer.echo(line)


def _job_table(outcomes: Sequence[SimulationOutcome]) -> str:
    from pipollux_simulator import JOB_COLUMNS, job_rows

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(JOB_COLUMNS)
    for outcome in outcomes:
        writer.writerows(job_rows(outcome))
    return text.getvalue()
