"""`pipollux serve`: run the scheduler in the foreground."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from pipollux_sched.allocator.expander import CommandExpander, Expander
from pipollux_sched.backend.local.hardware import this_machine
from pipollux_sched.backend.registry import DEFAULT_BACKEND, ENGINES
from pipollux_sched.backend.slurm.expander import SlurmExpander
from pipollux_sched.backend.slurm.rented_pools import RentedPools
from pipollux_sched.cli.serving import serve_until
from pipollux_sched.controller.watchdog import HEARTBEAT_TIMEOUT
from pipollux_sched.policy import DEFAULT_POLICY, AutoscalingRules, make_policy
from pipollux_sched.report.event_text import TELLING_TYPES, event_line
from pipollux_sched.scheduler import STOP_GRACE, Scheduler
from pipollux_sched.spec.job import ClusterSpec, load_cluster
from pipollux_sched.store import StateDir
from pipollux_sched.utils.signals import Interruption
from pipollux_sched.utils.text import count
from pipollux_sched.utils.units import MOST_SECONDS

from . import serve_kubernetes_options as kubernetes
from . import serve_slurm_options as slurm
from .options import ClusterFile, PassEnvironment, PolicyName, StateDirectory
from .serve_address import (
    AdvertiseUrl,
    AllowHost,
    Host,
    Port,
    TlsCa,
    TlsCert,
    TlsKey,
    server_address,
)


def serve(
    cluster: ClusterFile = None,
    state_dir: StateDirectory = None,
    policy: PolicyName = None,
    interval: Annotated[
        float,
        typer.Option(min=0.1, max=MOST_SECONDS, help="Seconds between two decisions on all jobs."),
    ] = 60.0,
    hints_interval: Annotated[
        float, typer.Option(min=0.1, max=MOST_SECONDS, help="Seconds between two hints of a job.")
    ] = 30.0,
    checkpoint_interval: Annotated[
        float,
        typer.Option(min=0.1, max=MOST_SECONDS, help="Seconds between two checkpoints of a job."),
    ] = 60.0,
    grace: Annotated[
        float,
        typer.Option(
            min=0.0, max=MOST_SECONDS, help="Seconds that a job has to save when it is stopped."
        ),
    ] = STOP_GRACE,
    heartbeat_timeout: Annotated[
        float,
        typer.Option(
            min=1.0,
            max=MOST_SECONDS,
            help="Seconds without a sign of life after which a replica is taken for lost.",
        ),
    ] = HEARTBEAT_TIMEOUT,
    open_metrics: Annotated[
        bool, typer.Option("--open-metrics", help="Let /metrics be read without the admin token.")
    ] = False,
    autoscale: Annotated[
        str | None,
        typer.Option(
            metavar="MIN:MAX",
            help="Say how many nodes there should be; needs --expander-command.",
            show_default=False,
        ),
    ] = None,
    expander_command: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Asks for nodes: run with {desired}, {current}, {release} filled in.",
            show_default=False,
        ),
    ] = None,
    pass_environment: PassEnvironment = None,
    store: Annotated[
        str | None,
        typer.Option(
            envvar="PIPOLLUX_STORE",
            metavar="URL",
            help="Database of the store: postgresql://USER@HOST/DATABASE.",
            show_default="SQLite in the state directory",
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    advertise_url: AdvertiseUrl = None,
    allow_host: AllowHost = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    backend: Annotated[
        str, typer.Option(metavar="NAME", help=f"What runs the jobs: {', '.join(ENGINES)}.")
    ] = DEFAULT_BACKEND,
    namespace: kubernetes.Namespace = None,
    scheduler_name: kubernetes.SchedulerName = None,
    device_resource: kubernetes.DeviceResource = None,
    node_selector: kubernetes.NodeSelector = None,
    toleration: kubernetes.Toleration = None,
    checkpoint_folder: kubernetes.CheckpointFolder = None,
    checkpoint_claim: kubernetes.CheckpointClaim = None,
    checkpoint_host_path: kubernetes.CheckpointHostPath = None,
    image_python: kubernetes.ImagePython = None,
    via: kubernetes.Via = None,
    trainjob_runtime: kubernetes.TrainJobRuntime = None,
    volcano_queue: kubernetes.VolcanoQueue = None,
    nodes: slurm.Nodes = None,
    partition: slurm.Partition = None,
    gres: slurm.Gres = None,
    time: slurm.TimeLimit = None,
    account: slurm.Account = None,
    qos: slurm.Qos = None,
    constraint: slurm.Constraint = None,
    reservation: slurm.Reservation = None,
    sbatch_option: slurm.SbatchOption = None,
    renew_before: slurm.RenewBefore = None,
    keep_pool: slurm.KeepPool = False,
) -> None:
    """Run the scheduler of a cluster in the foreground, until Ctrl-C.

    It keeps everything in its state directory. Jobs that run when it ends save,
    and resume when it is started again. From another terminal:

        pipollux submit examples/jobs.yaml
        pipollux jobs

    With the local backend, nodes are virtual: each is a name and a number of slots
    of this machine. A slot is a GPU, or on nodes of kind cpu a CPU device of one
    thread. Others use the nodes of a cluster: docs/slurm.md, docs/kubernetes.md.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    own = kubernetes.kubernetes_options(
        backend,
        {
            "namespace": namespace,
            "scheduler": scheduler_name,
            "device": device_resource,
            "node_selector": node_selector,
            "tolerations": toleration,
            "checkpoint_folder": checkpoint_folder,
            "checkpoint_claim": checkpoint_claim,
            "checkpoint_host_path": checkpoint_host_path,
            "python": image_python,
            "via": via,
            "runtime": trainjob_runtime,
            "volcano_queue": volcano_queue,
        },
    )
    directory = StateDir.choose(state_dir)
    pools, bounds = slurm.slurm_pools(
        backend,
        directory,
        nodes,
        {
            "partition": partition,
            "gres": gres,
            "time": time,
            "account": account,
            "qos": qos,
            "constraint": constraint,
            "reservation": reservation,
            "more": sbatch_option,
            "renew_before": renew_before,
            "keep": keep_pool,
        },
    )
    rules: AutoscalingRules | None
    expander: Expander | None
    if isinstance(pools, RentedPools) and bounds is not None and autoscale is None:
        rules = AutoscalingRules(min_nodes=bounds[0], max_nodes=bounds[1])
        expander = SlurmExpander(pools)
    else:
        rules, expander = _autoscaling(
            autoscale, expander_command, lambda: len(scheduler.store.nodes())
        )
    address = server_address(
        host=host,
        port=port,
        advertise_url=advertise_url,
        allowed_hosts=allow_host or (),
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_ca=tls_ca,
    )
    scheduler = Scheduler(
        directory,
        _cluster(backend, cluster),
        make_policy(policy or DEFAULT_POLICY),
        interval=interval,
        hints_interval=hints_interval,
        checkpoint_interval=checkpoint_interval,
        grace=grace,
        heartbeat_timeout=heartbeat_timeout,
        open_metrics=open_metrics,
        pass_environment=pass_environment or (),
        address=address,
        autoscaling=rules,
        expander=expander,
        on_event=_print_event,
        event_types=TELLING_TYPES,
        store=store,
        backend=backend,
        backend_options=own or pools,
    )
    with Interruption() as interruption:
        scheduler.start()
        known = scheduler.store.nodes().values()
        slots = sum(node.slots for node in known)
        typer.echo(
            f"Serving {count(len(known), 'node')} with {count(slots, 'slot')} at "
            f"{scheduler.url}{_listening(scheduler)}, "
            f"state in {directory.path}. Ctrl-C ends it."
        )
        if sys.stdout.isatty():  # a log must not contain the token
            typer.echo(f"Watch it at {scheduler.url}/#token={scheduler.admin_token}")
        serve_until(scheduler, interruption)
        typer.echo("Stopping: jobs save and go on when the scheduler is started again.")
        scheduler.stop(hurry=lambda: interruption.count > 1)


def _cluster(backend: str, file: Path | None) -> ClusterSpec | Path | None:
    """Return the nodes, or their file; None where the backend finds them itself."""
    if file is not None:
        load_cluster(file)  # before anything is made; the backend reads it again when it changes
        return file
    return this_machine() if backend == DEFAULT_BACKEND else None


def _listening(scheduler: Scheduler) -> str:
    """Return where it listens, if its URL does not say so."""
    where = scheduler.listening_url
    return "" if where == scheduler.url else f" (listening on {urlsplit(where).netloc})"


def _autoscaling(
    bounds: str | None, command: str | None, num_nodes: Callable[[], int]
) -> tuple[AutoscalingRules | None, CommandExpander | None]:
    """Parse the two options of autoscaling, which need each other."""
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
