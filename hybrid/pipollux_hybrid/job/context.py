"""The context of a job: what the parts of a process share.

The functions that a script calls (:func:`~pipollux_hybrid.remaining_epochs_until`,
:class:`~pipollux_hybrid.AdaptiveDataLoader`, …) find each other here, so that the script does not
have to pass them around. A process belongs to one job, hence there is one context at a time.
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

__all__ = ["JobContext", "context", "current", "from_scratch", "join", "reset"]

T = TypeVar("T")

PEER_TIMEOUT = 1800.0
"""Seconds that a replica waits for a slow peer before it gives up, torch's own default for gloo:
one replica may evaluate or save for minutes while the others wait."""


@dataclass
class JobContext:
    """What the parts of this package share inside one process."""

    env: JobEnvironment
    """Who this replica is; replaced when others join or leave."""
    control: ControlPlane
    mesh: ProcessMesh | None = None
    """The groups of this process where each stage has one; None where one drives all stages."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """What the loop body works on."""
    pipeline: PipelineSpec = field(default_factory=PipelineSpec)
    """What it is trained by."""
    step: int | None = None
    """Optimizer steps of the whole training, counted by the metrics; None before they are there."""
    joins: Announcement | None = None
    """What a replica knows of the running job that it is about to join; None: it takes part."""
    prepares: list[Callable[[int], Callable[[], None]]] = field(default_factory=list)
    """Called in another thread, while this replica trains, with a number of replicas that is to
    come: each gets what takes time. What it returns is called just before ``rejoined``."""
    rejoined: list[Callable[[], None]] = field(default_factory=list)
    """Called on all replicas after some have joined or left, when all have the same states."""
    joined: list[Callable[[], None]] = field(default_factory=list)
    """Called after that where some have joined: checks that all are equal now."""
    watch: PeerWatch | None = None
    """Finds out which replicas are gone."""
    heartbeat: Heartbeat | None = None
    """Tells the scheduler that this replica is alive; None: nobody wants to know."""
    closers: list[Callable[[], None]] = field(default_factory=list)
    """Called when the context ends, last one first."""
    _components: dict[Any, Any] = field(default_factory=dict)

    def component(self, kind: Callable[[JobContext], T]) -> T:
        """Return the one object of a class in this job, made at the first call.

        Args:
            kind: The class, which is called with this context.

        Example::

            metrics = context().component(Metrics)
        """
        if kind not in self._components:
            self._components[kind] = kind(self)
        found: T = self._components[kind]
        return found

    def check_joined(self) -> None:
        """Refuse to train by itself what is about to join others.

        Raises:
            ConfigurationError: This replica has not joined the job.
        """
        if self.joins is not None:
            raise ConfigurationError(
                "this replica has not joined the job yet, and would train by itself: replicas join "
                "in a loop over an AdaptiveDataLoader or AdaptiveBPTTIterator, so train in one"
            )

    def rejoin(self, env: JobEnvironment, group: ReplicaGroup | None, timeout: float) -> None:
        """Go on with other replicas; torch's default group and the mesh are of them already.

        Args:
            env: Who this replica is now.
            group: Of all replicas, for control messages; None for one.
            timeout: Seconds to wait for slow peers.
        """
        self.close_watch()
        self.env = env
        self.control.rejoin(group)
        self.watch = _watch(env, timeout, self.mesh)

    def close_watch(self) -> None:
        """Stop finding out which replicas are gone."""
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.close()

    def close(self) -> None:
        """End what runs in the background."""
        # Each of them, also where one before it fails.
        with ExitStack() as ending:
            ending.callback(self.control.close)
            for closer in self.closers:
                ending.callback(closer)
            self.closers.clear()


_context: JobContext | None = None


def context(timeout: float = PEER_TIMEOUT, env: JobEnvironment | None = None) -> JobContext:
    """Return the context of this process, made from the environment at the first call.

    Args:
        timeout: Seconds to wait for slow peers where ``PIPOLLUX_TIMEOUT`` does not say; the first
            call decides.
        env: The environment, for the first call; None: it is read.

    Raises:
        ConfigurationError: There are other replicas, and the script has not joined them yet.
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
    """Make the context of a replica that joins a running job; until then it is by itself.

    Args:
        env: The environment, with the rank that it is to have, and no other replicas; torch's
            default group is that of its processes.
        announcement: What the job told.
        timeout: Seconds to wait for slow peers.
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
    if env.stage == 0:  # for all processes of a replica
        ctx.heartbeat = Heartbeat.start(env, lambda: ctx.step)
    if ctx.heartbeat is not None:
        ctx.closers.append(ctx.heartbeat.close)  # of the first, so that it ends late
    return ctx


def _watch(env: JobEnvironment, timeout: float, mesh: ProcessMesh | None) -> PeerWatch | None:
    within: Set[str] = frozenset() if mesh is None else mesh.within
    return PeerWatch.start(env, timeout, within)


def from_scratch() -> str:
    """Return how to train from the beginning, to end a sentence with."""
    env = context().env
    if env.attempt and env.job_id:  # the scheduler sets the directory of each run
        return f"run `pipollux rerun {env.job_id} --from-scratch`"
    return "start with an empty PIPOLLUX_CHECKPOINT_DIR"


def current() -> JobContext | None:
    """Return the context of this process if there is one; does not make it."""
    return _context


def reset() -> None:
    """End the context; the next call of :func:`context` makes a new one."""
    global _context
    if _context is not None:
        _context.close()
    _context = None
    signals.reset()
