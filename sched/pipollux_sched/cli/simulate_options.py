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
        typer.Option("--on-arrival", help="Decide at every arrival, too, as a scheduler does."),
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
            help="Nodes of a type of GPU, in place of --nodes and --gpus; may be repeated.",
        ),
    ] = None
    add_nodes: Annotated[
        int,
        typer.Option(
            min=0,
            max=100_000,
            help="With --from-state: so many nodes more than there were, like most of them.",
        ),
    ] = 0
    teams: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML: teams and their quotas, as serve takes them.",
            show_default="none, or those of the history",
        ),
    ] = None
    interval: Annotated[
        float | None,
        typer.Option(
            max=1e6,
            help="Seconds between two decisions.",
            show_default="60, or that of the history",
        ),
    ] = None
    restart_seconds: Annotated[
        float | None,
        typer.Option(
            max=1e6,
            help="Seconds without training after every start of a job.",
            show_default="30, or as measured in the history",
        ),
    ] = None
    rescale_seconds: Annotated[
        float | None,
        typer.Option(
            max=1e6,
            help="Change jobs live where a replica stays in place: it trains on while others start "
            "(in the time of a restart), then pauses for this many seconds.",
            show_default="every change is a restart, or as measured in the history",
        ),
    ] = None
    interference: Annotated[
        float,
        typer.Option(help="Part of their pace that distributed jobs lose which share a node."),
    ] = 0.0
    failures: Annotated[
        bool,
        typer.Option("--failures", help="Let nodes fail, once in 75 days on average."),
    ] = False
    spot: Annotated[
        bool,
        typer.Option("--spot", help="Let nodes be preempted, once in 6 hours on average."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class SimulatedJobFlags:
    """What the command line says of jobs; None where it says nothing."""

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
            help="Replay the jobs that the scheduler of this state directory has had; "
            f"'{USUAL}': of the usual one.",
        ),
    ] = None
    known_length: Annotated[
        str | None,
        typer.Option(
            metavar="exact|none|learned|declared|FACTOR",
            help="What the policy is told of how long jobs still train: exactly, nothing, what it "
            "learns from those that have completed, the same but for jobs that declare it, or "
            "wrong by a factor of up to FACTOR either way.",
            show_default="exact; with --from-state declared",
        ),
    ] = None
    inherit_models: Annotated[
        bool | None,
        typer.Option(
            "--inherit-models/--no-inherit-models",
            help="Let jobs begin with what others of their family have measured.",
            show_default="only with --from-state",
        ),
    ] = None
    fit: Annotated[
        FitName,
        typer.Option(
            help="How jobs of the traces fit their model: as Pipollux's, or as AdaptDL's, whose "
            "model has fewer terms.",
        ),
    ] = FitName.pipollux
    load: Annotated[
        float,
        typer.Option(max=1e6, help="How many times as many jobs come in the same time."),
    ] = 1.0
    jobs: Annotated[int | None, typer.Option(min=1, help="Only the first so many.")] = None
    generate: Annotated[MixName | None, typer.Option(help="Draw a workload of this mix.")] = None
    num_jobs: Annotated[int, typer.Option(min=1, max=1_000_000, help="Jobs to draw.")] = 160
    hours: Annotated[float, typer.Option(max=1e6, help="Hours in which drawn jobs arrive.")] = 8.0
