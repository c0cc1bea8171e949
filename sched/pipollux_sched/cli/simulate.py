"""`pipollux simulate`: compare policies on a simulated cluster."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import (
    USAGE,
    CommandError,
    OutputFormat,
    libraries_on_stderr,
    output_console,
    print_data,
)
from .model_options import write_file
from .simulate_inputs import (
    cluster_nodes,
    draw_workload,
    input_errors,
    policy_names,
    read_workloads,
)

if TYPE_CHECKING:
    from pipollux_sched.simulator import SimulationMetrics, SimulationOutcome
    from pipollux_sched.simulator.applications.trace_model import Fit

_CLUSTER, _JOBS, _RESULT = "The cluster", "The jobs", "The result"


class MixName(StrEnum):
    """The mix of jobs in a generated workload."""

    pollux = "pollux"
    pipelines = "pipelines"
    mixed = "mixed"


class FitName(StrEnum):
    """How simulated jobs fit their model to their step times."""

    pipollux = "pipollux"
    adaptdl = "adaptdl"


def simulate(
    workloads: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[WORKLOAD.csv]...", help="Which jobs arrive when.", show_default=False
        ),
    ] = None,
    traces: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the public Pollux traces, one folder per application.",
            rich_help_panel=_JOBS,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            "-p",
            metavar="NAME,...",
            help="exact, pollux, sia, optimus, tiresias, fifo, or all.",
            show_default="the scheduler's",
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option(min=1, max=100_000, help="Number of nodes.", rich_help_panel=_CLUSTER)
    ] = 16,
    gpus: Annotated[
        int, typer.Option(min=1, max=1024, help="GPUs of each node.", rich_help_panel=_CLUSTER)
    ] = 4,
    node_type: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE=COUNTxGPUS",
            help="Nodes of a type of GPU, in place of --nodes and --gpus; may be repeated.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Of policies that draw, --generate, --failures and --spot.")
    ] = 0,
    interval: Annotated[
        float,
        typer.Option(max=1e6, help="Seconds between two decisions.", rich_help_panel=_CLUSTER),
    ] = 60.0,
    restart_seconds: Annotated[
        float,
        typer.Option(
            max=1e6,
            help="Seconds without training after every start of a job.",
            rich_help_panel=_CLUSTER,
        ),
    ] = 30.0,
    rescale_seconds: Annotated[
        float | None,
        typer.Option(
            max=1e6,
            help="Change jobs live where a replica stays in place: it trains on while others start "
            "(in the time of a restart), then pauses for this many seconds.",
            show_default="every change is a restart",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    interference: Annotated[
        float,
        typer.Option(
            help="Part of their pace that distributed jobs lose which share a node.",
            rich_help_panel=_CLUSTER,
        ),
    ] = 0.0,
    failures: Annotated[
        bool,
        typer.Option(
            "--failures",
            help="Let nodes fail, once in 75 days on average.",
            rich_help_panel=_CLUSTER,
        ),
    ] = False,
    spot: Annotated[
        bool,
        typer.Option(
            "--spot",
            help="Let nodes be preempted, once in 6 hours on average.",
            rich_help_panel=_CLUSTER,
        ),
    ] = False,
    known_length: Annotated[
        str,
        typer.Option(
            metavar="exact|none|learned|FACTOR",
            help="What the policy is told of how long jobs still train: exactly, nothing, what it "
            "learns from those that have completed, or wrong by a factor of up to FACTOR either "
            "way.",
            rich_help_panel=_JOBS,
        ),
    ] = "exact",
    inherit_models: Annotated[
        bool,
        typer.Option(
            "--inherit-models",
            help="Let jobs begin with what the last completed job of their family measured.",
            rich_help_panel=_JOBS,
        ),
    ] = False,
    fit: Annotated[
        FitName,
        typer.Option(
            help="How jobs of the traces fit their model: as Pipollux's, or as AdaptDL's, whose "
            "model has fewer terms.",
            rich_help_panel=_JOBS,
        ),
    ] = FitName.pipollux,
    load: Annotated[
        float,
        typer.Option(
            max=1e6,
            help="How many times as many jobs come in the same time.",
            rich_help_panel=_JOBS,
        ),
    ] = 1.0,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first so many.", rich_help_panel=_JOBS),
    ] = None,
    generate: Annotated[
        MixName | None,
        typer.Option(help="Draw a workload of this mix.", rich_help_panel=_JOBS),
    ] = None,
    num_jobs: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Jobs to draw.", rich_help_panel=_JOBS)
    ] = 160,
    hours: Annotated[
        float,
        typer.Option(max=1e6, help="Hours in which drawn jobs arrive.", rich_help_panel=_JOBS),
    ] = 8.0,
    processes: Annotated[
        int, typer.Option(min=1, max=1024, help="How many simulations run side by side.")
    ] = 1,
    output: Annotated[
        OutputFormat,
        typer.Option("--output", "-o", help="How to print the result.", rich_help_panel=_RESULT),
    ] = OutputFormat.table,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="HTML: completion times, use and who held what.",
            rich_help_panel=_RESULT,
        ),
    ] = None,
    save_jobs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV: a row for every job.", rich_help_panel=_RESULT),
    ] = None,
) -> None:
    r"""Try policies on a simulated cluster, and compare them.

    [bold]A workload[/bold] is a CSV file, in the format of the public Pollux workloads:

        name,time,application,num_replicas,batch_size
        cifar10-0,124,cifar10,2,1024

    Applications are cifar10, bert, imagenet, ncf, deepspeech2 and yolov3, read from
    their traces, and pipelines that are computed: gpt-1.3b, gpt-2.7b, gpt-6.7b, gpt-13b.

        pipollux simulate workload-1.csv --traces traces --policy exact,pollux
        pipollux simulate --generate pipelines --num-jobs 40 --nodes 8 --gpus 8

    Every workload is run under every policy. JCT is the time from a job's arrival to its
    completion; fairness is JCT over the time alone on an equal share of the GPUs, and
    "unfair to" the share of jobs with a fairness above 1; policy time is the
    wall-clock time of all decisions. For details see docs/simulator.md.

    Exit code: 0 done; 1 a simulation failed; 2 a file or an option is wrong.
    """
    from pipollux_sched.simulator import (
        Experiment,
        KnownLength,
        Options,
        measure,
        node_events,
        run_pairs,
    )

    from .simulation_progress import progress_bars

    with input_errors():
        _one_source(workloads, generate)
        policies = policy_names(policy)
        there = cluster_nodes(nodes, gpus, node_type or (), preemptible=spot)
        options = Options(
            interval,
            restart_seconds,
            rescale_seconds,
            interference,
            known_length=KnownLength.parse(known_length, seed),
            inherit_models=inherit_models,
        )
        events = node_events([*there], options.most_days, seed, failures=failures, spot=spot)
        experiment = Experiment(
            there, replace(options, node_events=events), traces, seed, _fit(fit)
        )
        if generate is None:
            chosen = read_workloads(workloads or (), load, jobs)
        else:
            drawn = draw_workload(generate.value, experiment, num_jobs, hours, load)
            chosen = [replace(drawn, jobs=drawn.jobs[:jobs])]
        for workload in chosen:
            experiment.applications(workload)
    pairs = [(workload, name) for workload in chosen for name in policies]
    with libraries_on_stderr(), progress_bars(pairs) as watch:
        outcomes = run_pairs(experiment, pairs, watch, processes)
    _print([measure(one) for one in outcomes], output)
    if plot is not None:
        from pipollux_sched.simulator.results.page import render_plots

        write_file(plot, "--plot", render_plots(outcomes).encode())
    if save_jobs is not None:
        write_file(save_jobs, "--save-jobs", _job_table(outcomes).encode())


def _fit(name: FitName) -> Fit:
    from pipollux_perfmodel import fit_like_adaptdl, fit_perf_params

    return fit_like_adaptdl if name is FitName.adaptdl else fit_perf_params


def _one_source(workloads: Sequence[Path] | None, mix: MixName | None) -> None:
    """Check that jobs come either from files or from a mix.

    Raises:
        CommandError: they come from both, or from neither.
    """
    if workloads and mix is not None:
        raise CommandError(
            f"--generate {mix.value} and {workloads[0]} both say which jobs there are; "
            "leave one of them out",
            USAGE,
        )
    if not workloads and mix is None:
        raise CommandError("there are no jobs; give a WORKLOAD.csv or --generate MIX", USAGE)


def _print(rows: Sequence[SimulationMetrics], output: OutputFormat) -> None:
    if output is OutputFormat.table:
        from pipollux_sched.simulator.results.table import metrics_table

        output_console().print(metrics_table(rows))
    else:
        print_data([row.to_dict() for row in rows], output)


def _job_table(outcomes: Sequence[SimulationOutcome]) -> str:
    from pipollux_sched.simulator import JOB_COLUMNS, job_rows

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(JOB_COLUMNS)
    for outcome in outcomes:
        writer.writerows(job_rows(outcome))
    return text.getvalue()
