"""`pipollux serve`: run the scheduler in the foreground."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

import typer

from pipollux_policies import DEFAULT_POLICY, AutoscalingRules, make_policy
from pipollux_sched.allocator.expander import CommandExpander, Expander
from pipollux_sched.backend.local import cgroups
from pipollux_sched.backend.local.hardware import this_machine
from pipollux_sched.backend.registry import DEFAULT_BACKEND, ENGINES
from pipollux_sched.backend.slurm.rented_pools import RentedPools
from pipollux_sched.cli.serving import serve_until
from pipollux_sched.controller.watchdog import HEARTBEAT_TIMEOUT
from pipollux_sched.forecasting.loop import SHARE
from pipollux_sched.notifications.hosts import HostRules
from pipollux_sched.notifications.notifier import NotifyOptions
from pipollux_sched.report.event_text import TELLING_TYPES, event_line
from pipollux_sched.scheduler import STOP_GRACE, Scheduler
from pipollux_sched.spec.cluster import ClusterSpec, load_cluster
from pipollux_sched.spec.teams import load_teams
from pipollux_sched.store import StateDir
from pipollux_sched.utils.signals import Interruption
from pipollux_utils.text import count
from pipollux_utils.units import MOST_SECONDS

from .option_group import with_groups
from .options import (
    ClusterFile,
    PassEnvironment,
    PolicyName,
    StateDirectory,
)
from .serve_address import AddressFlags, server_address
from .serve_kubernetes_options import KubernetesFlags, kubernetes_options
from .serve_ray_options import RayFlags, ray_options
from .serve_slurm_options import SlurmFlags, slurm_pools

SWITCH_INTERVAL = 0.0005
"""Seconds after which a computing thread yields to another: a decision on thousands of jobs takes
seconds, in which a heartbeat waits for each access to its connection."""
COLLECTION_THRESHOLDS = (50_000, 20, 50)
"""Thresholds of Python's garbage collector. With thousands of jobs in memory a full collection
takes a good part of a second, and by default a burst of requests triggers one after the other."""


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """Options of `serve` about nodes."""

    panel: ClassVar[str] = "Cluster"
    cluster: ClusterFile = None
    backend: Annotated[
        str, typer.Option(metavar="NAME", help=f"Backend that runs jobs: {', '.join(ENGINES)}.")
    ] = DEFAULT_BACKEND
    cpu_slots: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="CPU slots beside the GPUs of this machine, for jobs with device: cpu.",
        ),
    ] = 0
    autoscale: Annotated[
        str | None,
        typer.Option(
            metavar="MIN:MAX",
            help="Range of the number of nodes; needs --expander-command.",
            show_default=False,
        ),
    ] = None
    expander_command: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Command that requests nodes; {desired}, {current}, {release} are filled in.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PolicyFlags:
    """Options of `serve` about decisions."""

    panel: ClassVar[str] = "Policy"
    policy: PolicyName = None
    teams: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML: teams with quotas and limits; reloaded when the file changes.",
            show_default="the teams in the store",
        ),
    ] = None
    interval: Annotated[
        float,
        typer.Option(min=0.1, max=MOST_SECONDS, help="Seconds between two scheduling rounds."),
    ] = 60.0
    forecasts: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="SHARE",
            help="Largest share of one core for forecasts of starts and ends; 0: none.",
        ),
    ] = SHARE


@dataclass(frozen=True, kw_only=True)
class JobFlags:
    """Options of `serve` about jobs."""

    panel: ClassVar[str] = "Jobs"
    hints_interval: Annotated[
        float, typer.Option(min=0.1, max=MOST_SECONDS, help="Seconds between hints of a job.")
    ] = 30.0
    checkpoint_interval: Annotated[
        float, typer.Option(min=0.1, max=MOST_SECONDS, help="Seconds between checkpoints of a job.")
    ] = 60.0
    grace: Annotated[
        float,
        typer.Option(
            min=0.0, max=MOST_SECONDS, help="Seconds that a job has for saving when it is stopped."
        ),
    ] = STOP_GRACE
    heartbeat_timeout: Annotated[
        float,
        typer.Option(
            min=1.0,
            max=MOST_SECONDS,
            help="Seconds without a heartbeat after which a replica is lost.",
        ),
    ] = HEARTBEAT_TIMEOUT
    pass_environment: PassEnvironment = None
    notify_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            help="Host that notifications may be sent to: a name, *.DOMAIN, an address, a network, "
            "'public' or 'none'; repeatable.",
            show_default="public",
        ),
    ] = None


@with_groups
def serve(
    state_dir: StateDirectory = None,
    store: Annotated[
        str | None,
        typer.Option(
            envvar="PIPOLLUX_STORE",
            metavar="URL",
            help="Database URL of the store: postgresql://USER@HOST/DATABASE.",
            show_default="SQLite in the state directory",
        ),
    ] = None,
    *,
    nodes: ClusterFlags,
    deciding: PolicyFlags,
    jobs: JobFlags,
    address: AddressFlags,
    kubernetes: KubernetesFlags,
    ray: RayFlags,
    slurm: SlurmFlags,
) -> None:
    """Run the scheduler of a cluster in the foreground, until Ctrl-C.

    The state directory holds its state. When the scheduler ends, running jobs save;
    when it starts again, they resume. From another terminal:

        pipollux submit examples/jobs.yaml
        pipollux jobs

    With the local backend, nodes are virtual: each is a name and a number of slots
    of this machine. A slot is a GPU, or a CPU device of one thread on nodes of kind
    cpu. Other backends use the nodes of a cluster: see docs/howto/slurm.md,
    docs/howto/kubernetes.md and docs/howto/ray.md.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    own = kubernetes_options(nodes.backend, kubernetes) or ray_options(nodes.backend, ray)
    directory = StateDir.choose(state_dir)
    pools, bounds = slurm_pools(nodes.backend, directory, slurm)
    rules: AutoscalingRules | None
    expander: Expander | None
    if isinstance(pools, RentedPools) and bounds is not None and nodes.autoscale is None:
        rules = AutoscalingRules(min_nodes=bounds[0], max_nodes=bounds[1])
        expander = pools
    else:
        rules, expander = _autoscaling(
            nodes.autoscale, nodes.expander_command, lambda: len(scheduler.store.nodes())
        )
    if deciding.teams is not None:
        load_teams(deciding.teams)  # before anything is made; it is read again when it changes
    where = server_address(address)
    scheduler = Scheduler(
        directory,
        _cluster(nodes.backend, nodes.cluster, nodes.cpu_slots),
        make_policy(deciding.policy or DEFAULT_POLICY),
        interval=deciding.interval,
        forecasts=deciding.forecasts,
        hints_interval=jobs.hints_interval,
        checkpoint_interval=jobs.checkpoint_interval,
        grace=jobs.grace,
        heartbeat_timeout=jobs.heartbeat_timeout,
        open_metrics=address.open_metrics,
        pass_environment=jobs.pass_environment or (),
        address=where,
        autoscaling=rules,
        expander=expander,
        on_event=_print_event,
        event_types=TELLING_TYPES,
        store=store,
        teams=deciding.teams,
        notify=_notify_options(jobs.notify_host),
        backend=nodes.backend,
        backend_options=own or pools,
    )
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.set_threshold(*COLLECTION_THRESHOLDS)
    with Interruption() as interruption:
        try:
            scheduler.start(interruption.raising)
        except KeyboardInterrupt:
            typer.echo("Stopped before a connection to the cluster was made.")
            return
        known = scheduler.store.nodes().values()
        slots = sum(node.slots for node in known)
        typer.echo(
            f"Serving {count(len(known), 'node')} with {count(slots, 'slot')} at "
            f"{scheduler.url}{_listening(scheduler)}, "
            f"state in {directory.path}. Ctrl-C ends it."
        )
        if sys.stdout.isatty():  # a log must not contain the token
            typer.echo(f"Watch it at {scheduler.url}/#token={scheduler.admin_token}")
        else:
            token = directory.admin_token_file
            typer.echo(f"Watch it at {scheduler.url}/ with the token in {token}")
        if nodes.backend == DEFAULT_BACKEND:
            typer.echo(cgroups.describe())
        serve_until(scheduler, interruption)
        typer.echo("Stopping: jobs save, and resume when the scheduler is started again.")
        scheduler.stop(hurry=lambda: interruption.count > 1)


def _cluster(backend: str, file: Path | None, cpu_slots: int) -> ClusterSpec | Path | None:
    """Return the nodes, or their file; None where the backend discovers them."""
    if cpu_slots and (file is not None or backend != DEFAULT_BACKEND):
        raise typer.BadParameter(
            "is for this machine without a cluster file; there, give cpu_slots to a node with GPUs",
            param_hint="'--cpu-slots'",
        )
    if file is not None:
        load_cluster(file)  # before anything is made; the backend reads it again when it changes
        return file
    return this_machine(cpu_slots) if backend == DEFAULT_BACKEND else None


def _notify_options(hosts: list[str] | None) -> NotifyOptions:
    try:
        HostRules.parse(hosts or ())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--notify-host'") from None
    return NotifyOptions(hosts=hosts) if hosts else NotifyOptions()


def _listening(scheduler: Scheduler) -> str:
    where = scheduler.listening_url
    return "" if where == scheduler.url else f" (listening on {urlsplit(where).netloc})"


def _autoscaling(
    bounds: str | None, command: str | None, num_nodes: Callable[[], int]
) -> tuple[AutoscalingRules | None, CommandExpander | None]:
    """Parse the two options of autoscaling, which require each other."""
    if bounds is None and command is None:
        return None, None
    if bounds is None or command is None:
        given, missing = ("--autoscale", "--expander-command")[:: 1 if bounds else -1]
        raise typer.BadParameter(f"needs {missing}, too", param_hint=f"'{given}'")
    least, colon, most = bounds.partition(":")
    try:
        if not (colon and least.isdecimal() and most.isdecimal()):
            raise ValueError(f"{bounds!r} is not MIN:MAX, two whole numbers as in 1:16")
        rules = AutoscalingRules(min_nodes=int(least), max_nodes=int(most))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--autoscale'") from None
    try:
        return rules, CommandExpander(command, count=num_nodes)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--expander-command'") from None


def _print_event(event: Mapping[str, Any]) -> None:
    line = event_line(event)
    if line:
        typer.echo(line)
