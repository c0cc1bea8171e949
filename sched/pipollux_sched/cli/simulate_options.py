"""Options of `pipollux simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from .options import Fairness, RankPower, Scarcity, Tail
from .simulate_history import USUAL

__all__ = ["FitName", "MixName", "SimulatedClusterFlags", "SimulatedJobFlags"]


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
    """What the command line says of the cluster; None where it says nothing."""

    panel: ClassVar[str] = "The cluster"
    fairness: Fairness = None
    scarcity: Scarcity = None
    tail: Tail = None
    rank_power: RankPower = None
    on_arrival: Annotated[
        bool,
        typer.Option("--on-arrival", help="Decide also at each arrival, as the scheduler does."),
    ] = False
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000,
            help="Number of nodes.",
            show_default="16, or those of the history",
        ),
    ] = None
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="GPUs of each node.", show_default="4"),
    ] = None
    node_type: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE=COUNTxGPUS",
            help="Nodes with one GPU type, instead of --nodes and --gpus; may be repeated.",
        ),
    ] = None
    add_nodes: Annotated[
        int,
        typer.Option(
            min=0,
            max=100_000,
            help="With --from-state: number of additional nodes, of the most frequent kind.",
        ),
    ] = 0
    teams: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML file of teams.",
            show_default="none, or those of the history",
        ),
    ] = None
    interval: Annotated[
        float | None,
        typer.Option(
            max=1e6,
            help="Seconds between allocation decisions.",
            show_default="60, or that of the history",
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
            help="Resize jobs elastically where a replica survives: it trains while others start, "
            "in the time of a restart, then pauses for this many seconds.",
            show_default="every change is a restart, or as measured in the history",
        ),
    ] = None
    interference: Annotated[
        float,
        typer.Option(help="Fraction of throughput that distributed jobs on a shared node lose."),
    ] = 0.0
    failures: Annotated[
        bool,
        typer.Option(
            "--failures", help="Simulate node failures, one in 75 days on average for each node."
        ),
    ] = False
    spot: Annotated[
        bool,
        typer.Option(
            "--spot", help="Simulate preemption, one in 6 hours on average for each node."
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class SimulatedJobFlags:
    """What the command line says of jobs; None where it says nothing."""

    panel: ClassVar[str] = "The jobs"
    traces: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the public Pollux traces, with one folder per application.",
        ),
    ] = None
    from_state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="State directory of a scheduler whose jobs are replayed; "
            f"'{USUAL}': the default one.",
        ),
    ] = None
    known_length: Annotated[
        str | None,
        typer.Option(
            metavar="exact|none|learned|declared|FACTOR",
            help="Remaining job lengths that the policy knows: exact, none, estimated from "
            "completed jobs (learned), declared by the job or else estimated, or wrong by a "
            "factor of up to FACTOR.",
            show_default="exact; with --from-state declared",
        ),
    ] = None
    inherit_models: Annotated[
        bool | None,
        typer.Option(
            "--inherit-models/--no-inherit-models",
            help="Share measured step times within families of jobs.",
            show_default="only with --from-state",
        ),
    ] = None
    fit: Annotated[
        FitName,
        typer.Option(
            help="Performance model of the jobs: that of Pipollux or that of AdaptDL.",
        ),
    ] = FitName.pipollux
    load: Annotated[
        float,
        typer.Option(max=1e6, help="Factor of the arrival rate."),
    ] = 1.0
    jobs: Annotated[int | None, typer.Option(min=1, help="Simulate the first N jobs only.")] = None
    generate: Annotated[
        MixName | None, typer.Option(help="Generate a random workload of this mix.")
    ] = None
    num_jobs: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Number of generated jobs.")
    ] = 160
    hours: Annotated[float, typer.Option(max=1e6, help="Hours in which generated jobs arrive.")] = (
        8.0
    )
