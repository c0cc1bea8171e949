"""The context of a job: what the parts of a process share.

The functions that a script calls (:func:`~pipollux_hybrid.remaining_epochs_until`,
:class:`~pipollux_hybrid.AdaptiveDataLoader`, …) find each other here, so that the script does not
have to pass them around. A process belongs to one job, hence there is one context at a time.
"""

from __future__ import annotations

from collections.abc import Callable
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
from .heartbeat import Heartbeat
from .peers import PeerWatch
from .pipeline_spec import PipelineSpec

__all__ = ["JobContext", "context", "current", "reset"]

T = TypeVar("T")

PEER_TIMEOUT = 1800.0
"""Seconds that a replica waits for a slow peer before it gives up, torch's own default for gloo:
one replica may evaluate or save for minutes while the others wait."""


@dataclass
class JobContext:
    """What the parts of this package share inside one process."""

    env: JobEnvironment
    control: ControlPlane
    batch: BatchConfig = field(default_factory=BatchConfig)
    """What the loop body works on."""
    pipeline: PipelineSpec = field(default_factory=PipelineSpec)
    """What it is trained by."""
    step: int | None = None
    """Optimizer steps of the whole training, counted by the metrics; None before they are there."""
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

    def close(self) -> None:
        """End what runs in the background."""
        # Each of them, also where one before it fails.
        with ExitStack() as ending:
            ending.callback(self.control.close)
            for closer in self.closers:
                ending.callback(closer)
            self.closers.clear()


_context: JobContext | None = None


def context(timeout: float = PEER_TIMEOUT) -> JobContext:
    """Return the context of this process, made from the environment at the first call.

    Args:
        timeout: Seconds to wait for slow peers where ``PIPOLLUX_TIMEOUT`` does not say; the first
            call decides.

    Raises:
        ConfigurationError: There are other replicas, and the script has not joined them yet.
    """
    global _context
    if _context is None:
        env = JobEnvironment.read()
        if env.num_replicas > 1 and not dist.is_initialized():
            raise ConfigurationError(
                f"this is replica {env.rank} of {env.num_replicas}, which has not joined the "
                "others: call pipollux.init_process_group() at the beginning of the script"
            )
        timeout = env.timeout or timeout
        control = ControlPlane(env.num_replicas, timeout)
        agree(control, "their environment", environment_settings(env))
        _context = _begin(env, control, timeout)
    return _context


def _begin(env: JobEnvironment, control: ControlPlane, timeout: float) -> JobContext:
    ctx = JobContext(env=env, control=control)
    watch = PeerWatch.start(env, timeout)
    if watch is not None:
        ctx.closers.append(watch.close)
    heartbeat = Heartbeat.start(env, lambda: ctx.step)
    if heartbeat is not None:
        ctx.closers.append(heartbeat.close)  # of the first, so that it ends late
    return ctx


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
