"""Options of `pipollux simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from .simulate_history import USUAL


class MixName(StrEnum):
    """The mix of jobs in a generated workload."""

    pollux = "pollux"
    pipelines = "pipelines"
    mixed = "mixed"


class FitName(StrEnum):
    """How simulated jobs fit their model to their step times."""

    pipollux = "pipollux"
    adaptdl = "adaptdl"


@dataclass(frozen=True, kw_only=True)
class SimulatedClusterFlags:
    """Options of `simulate` about the cluster; None if not given."""

    panel: ClassVar[str] = "The cluster"
    on_arrival: Annotated[
        bool,
        typer.Option("--on-arrival", help="Also decide at every arrival, as the scheduler does."),
    ] = False
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000,
            help="Number of nodes.",
            show_default="16, or the nodes of the history",
        ),
    ] = None
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="GPUs per node.", show_default="4"),
    ] = None
    node_type: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE=COUNTxGPUS",
            help="Nodes of one GPU type, instead of --nodes and --gpus; may be repeated.",
        ),
    ] = None
    level: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NODESxSLOWER",
            help="A network level between nodes, the narrowest first: NODES nodes per domain, and "
            "how many times slower gradients are synchronized between domains, as in rack=4x3; "
            "may be repeated.",
        ),
    ] = None
    add_nodes: Annotated[
        int,
        typer.Option(
            min=0,
            max=100_000,
            help="With --from-state: additional nodes of the most common kind.",
        ),
    ] = 0
    teams: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML: teams and their quotas, in the format of serve.",
            show_default="none, or the teams of the history",
        ),
    ] = None
    interval: Annotated[
        float | None,
        typer.Option(
            max=1e6,
            help="Seconds between two decisions.",
            show_default="60, or the interval of the history",
        ),
    ] = None
    restart_seconds: Annotated[
        float | None,
        typer.Option(
            max=1e6,
            help="Seconds without training after each start of a job.",
            show_default="30, or as measured in the history",
        ),
    ] = None
    rescale_seconds: Annotated[
        float | None,
        typer.Option(
            max=1e6,
            help="Resize jobs elastically if a replica stays in place: it trains while the others "
            "start (for the duration of a restart), then pauses for this many seconds.",
            show_default="restart at every change, or as measured in the history",
        ),
    ] = None
    interference: Annotated[
        float,
        typer.Option(help="Fraction of speed that distributed jobs lose when they share a node."),
    ] = 0.0
    failures: Annotated[
        bool,
        typer.Option("--failures", help="Simulate node failures: one in 75 days per node."),
    ] = False
    spot: Annotated[
        bool,
        typer.Option("--spot", help="Simulate spot preemptions: one in 6 hours per node."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class SimulatedJobFlags:
    """Options of `simulate` about jobs; None if not given."""

    panel: ClassVar[str] = "The jobs"
    traces: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the public Pollux traces, one folder per application."
        ),
    ] = None
    from_state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Replay the jobs of the scheduler with this state directory; "
            f"'{USUAL}': the default directory.",
        ),
    ] = None
    known_length: Annotated[
        str | None,
        typer.Option(
            metavar="exact|none|learned|declared|FACTOR",
            help="Job lengths as known to the policy: exact; unknown (none); estimated from "
            "completed jobs (learned); estimated, except for jobs that declare theirs "
            "(declared); or wrong by up to FACTOR either way.",
            show_default="exact; with --from-state declared",
        ),
    ] = None
    inherit_models: Annotated[
        bool | None,
        typer.Option(
            "--inherit-models/--no-inherit-models",
            help="Start jobs with the measurements of completed jobs of their family.",
            show_default="only with --from-state",
        ),
    ] = None
    fit: Annotated[
        FitName,
        typer.Option(
            help="Performance model of trace jobs: Pipollux's, or AdaptDL's, which has fewer "
            "terms.",
        ),
    ] = FitName.pipollux
    load: Annotated[
        float,
        typer.Option(max=1e6, help="Factor of the arrival rate."),
    ] = 1.0
    jobs: Annotated[int | None, typer.Option(min=1, help="Number of first jobs to keep.")] = None
    generate: Annotated[MixName | None, typer.Option(help="Generate this mix of jobs.")] = None
    num_jobs: Annotated[int, typer.Option(min=1, max=1_000_000, help="Jobs to generate.")] = 160
    hours: Annotated[float, typer.Option(max=1e6, help="Hours in which they arrive.")] = 8.0
