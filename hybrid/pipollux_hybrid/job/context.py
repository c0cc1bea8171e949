"""The context of a job: state shared by the parts of this package in one process.

The functions of the public API (:func:`~pipollux_hybrid.remaining_epochs_until`,
:class:`~pipollux_hybrid.AdaptiveDataLoader`, …) find each other here, so the script does not pass
them around. A process belongs to one job at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from pipollux_hybrid.errors import ConfigurationError

from . import signals
from .agreement import agree, environment_settings
from .batch import BatchConfig
from .control_plane import ControlPlane
from .env import JobEnvironment
from .groups import ReplicaGroup
from .heartbeat import Heartbeat
from .membership import Announcement
from .mesh import ProcessMesh
from .peers import PeerWatch
from .pipeline_spec import PipelineSpec

T = TypeVar("T")

PEER_TIMEOUT = 1800.0
"""Seconds to wait for a slow peer (torch's default for gloo), which may evaluate for minutes."""


@dataclass(frozen=True, kw_only=True)
class AtServers:
    """The job of a replica that meets the others at servers, as it was when they last answered."""

    replicas: tuple[int, ...] = (0,)
    """Ids of all replicas, in increasing order."""
    num_nodes: int = 1
    sync_time: float = 0.0
    """Seconds of a push and pull of all parameters; 0: not measured."""
    sync_every: int = 0
    """H, or `pipollux_perfmodel.timing.params.AUTO`."""
    sync_overlap: int = 0
    """τ."""


@dataclass
class JobContext:
    """State shared by the parts of this package in one process."""

    env: JobEnvironment
    """Environment of this replica; replaced at each elastic resize."""
    control: ControlPlane
    mesh: ProcessMesh | None = None
    """The process groups of a multi-process pipeline."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    pipeline: PipelineSpec = field(default_factory=PipelineSpec)
    at_servers: AtServers | None = None
    """Set if this replica pushes and pulls."""
    step: int | None = None
    """Optimizer steps of the whole training, counted by the metrics; None before they exist."""
    joins: Announcement | None = None
    """Announcement of the running job that this replica is about to join; None: it is a member."""
    prepares: list[Callable[[int], Callable[[], None]]] = field(default_factory=list)
    """Slow preparations for an elastic resize: called with the next number of replicas in another
    thread, while this replica trains. Each returns a function called just before ``rejoined``."""
    rejoined: list[Callable[[], None]] = field(default_factory=list)
    """Called on all replicas after an elastic resize, once all have the same states."""
    joined: list[Callable[[], None]] = field(default_factory=list)
    """Called after ``rejoined`` if replicas have joined: checks that all replicas are equal."""
    watch: PeerWatch | None = None
    heartbeat: Heartbeat | None = None
    """Sends heartbeats to the scheduler, if one expects them."""
    closers: list[Callable[[], None]] = field(default_factory=list)
    """Called in reverse order when the context closes."""
    _components: dict[Any, Any] = field(default_factory=dict)

    def component(self, kind: Callable[[JobContext], T]) -> T:
        """Return the job's singleton of a class, created with this context at the first call.

        Example::

            metrics = context().component(Metrics)
        """
        if kind not in self._components:
            self._components[kind] = kind(self)
        found: T = self._components[kind]
        return found

    @property
    def num_replicas(self) -> int:
        """R of the whole job, also where each replica is a job of one by its environment."""
        return self.env.num_replicas if self.at_servers is None else len(self.at_servers.replicas)

    @property
    def num_nodes(self) -> int:
        """Nodes of these replicas."""
        return self.env.num_nodes if self.at_servers is None else self.at_servers.num_nodes

    @property
    def network_level(self) -> int:
        """Level of the network at which the job's nodes meet; nodes may be relabelled meanwhile."""
        told = None if self.heartbeat is None else self.heartbeat.network_level
        return told or self.env.network_level

    def check_joined(self) -> None:
        """Raise a ConfigurationError if this replica joins a job and would train alone."""
        if self.joins is not None:
            raise ConfigurationError(
                "this replica has not joined the job yet, and would train by itself: replicas join "
                "in a loop over an AdaptiveDataLoader or AdaptiveBPTTIterator, so train in one"
            )

    def rejoin(self, env: JobEnvironment, group: ReplicaGroup | None, timeout: float) -> None:
        """Continue with other replicas; torch's default group and the mesh are replaced already.
        ``group`` is that of all replicas for control messages, None for one replica.
        """
        self.close_watch()
        self.env = env
        self.control.rejoin(group)
        self.watch = _watch(env, timeout, self.mesh)

    def close_watch(self) -> None:
        """Stop watching for lost replicas."""
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.close()

    def close(self) -> None:
        """Stop background work."""
        # All of them run, also after one fails.
        with ExitStack() as ending:
            ending.callback(self.control.close)
            for closer in self.closers:
                ending.callback(closer)
            self.closers.clear()


_context: JobContext | None = None


def context(timeout: float = PEER_TIMEOUT, env: JobEnvironment | None = None) -> JobContext:
    """Return the context of this process, created from the environment at the first call.

    ``timeout``, in seconds for slow peers unless ``PIPOLLUX_TIMEOUT`` is set, and ``env`` (None:
    read from ``os.environ``) are those of the first call. Raises a ConfigurationError if there are
    other replicas that the script has not joined yet.
    """
    global _context
    if _context is None:
        env = env or JobEnvironment.read()
        if env.world_size > 1 and not dist.is_initialized():
            raise ConfigurationError(
                f"this is replica {env.rank} of {env.num_replicas}, which has not joined the "
                "others: call pipollux.init_process_group() at the beginning of the script"
            )
        timeout = env.timeout or timeout
        control = ControlPlane(env.world_size, timeout)
        agree(control, "their environment", environment_settings(env))
        _context = _begin(env, control, timeout)
    return _context


def join(env: JobEnvironment, announcement: Announcement, timeout: float) -> JobContext:
    """Create the context of a replica that joins a running job; until then it is alone. ``env`` has
    the future rank and no other replicas; torch's default group holds the processes of this
    replica.
    """
    global _context
    control = ControlPlane(env.world_size, timeout)
    agree(control, "their environment", environment_settings(env))
    _context = _begin(env, control, timeout)
    _context.joins = announcement
    return _context


def _begin(env: JobEnvironment, control: ControlPlane, timeout: float) -> JobContext:
    ctx = JobContext(env=env, control=control)
    if env.processes_per_replica > 1:
        ctx.mesh = control.mesh = ProcessMesh(env, timeout)
    ctx.watch = _watch(env, timeout, ctx.mesh)
    ctx.closers.append(ctx.close_watch)
    if env.stage == 0:  # on behalf of all processes of the replica
        ctx.heartbeat = Heartbeat.start(env, lambda: ctx.step)
    if ctx.heartbeat is not None:
        ctx.closers.append(ctx.heartbeat.close)  # early in the list, so it closes late
    return ctx


def _watch(env: JobEnvironment, timeout: float, mesh: ProcessMesh | None) -> PeerWatch | None:
    within: Set[str] = frozenset() if mesh is None else mesh.within
    return PeerWatch.start(env, timeout, within)


def from_scratch() -> str:
    """Return how to train from scratch, to end a sentence with."""
    env = context().env
    if env.attempt and env.job_id:  # the scheduler sets the directory of each run
        return f"run `pipollux rerun {env.job_id} --from-scratch`"
    return "start with an empty PIPOLLUX_CHECKPOINT_DIR"


def current() -> JobContext | None:
    """Return the context of this process if it exists; does not create it."""
    return _context


def reset() -> None:
    """Close the context; the next call of :func:`context` creates a new one."""
    global _context
    if _context is not None:
        _context.close()
    _context = None
    signals.reset()
