"""The one job that a process works on: what its parts share.

The functions that a script calls (:func:`~pipollux_hybrid.remaining_epochs_until`,
:class:`~pipollux_hybrid.AdaptiveDataLoader`, …) find each other here, so that the script does not
have to pass them around. A process belongs to one job, hence there is one context at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from . import interrupt
from .agreement import agree, environment_settings
from .background import BackgroundSave
from .control import ControlPlane
from .env import JobEnvironment
from .errors import ConfigurationError
from .heartbeat import Heartbeat

if TYPE_CHECKING:
    from torch import Tensor

    from pipollux_perfmodel.timing.params import Checkpoint

    from .checkpoint import State
    from .metrics import Metrics
    from .reporter import Reporter
    from .trace import Tracer

__all__ = ["JobContext", "MicroStep", "context", "current", "reset"]

PEER_TIMEOUT = 1800.0
"""Seconds that a replica waits for a silent peer before it gives up, torch's own default for gloo:
one replica may evaluate or save for minutes while the others wait."""


@dataclass(frozen=True)
class MicroStep:
    """The part of an iteration that one pass of the user's loop body works on."""

    num_samples: int
    """Samples of this replica that count; 0 when the batch only keeps step with its peers."""
    is_optimizer_step: bool
    """Whether gradients are synchronised and the optimizer steps after this one."""


@dataclass
class JobContext:
    """What the parts of this package share inside one process."""

    env: JobEnvironment
    control: ControlPlane
    states: dict[str, State] = field(default_factory=dict)
    """Everything that a checkpoint holds, by name."""
    micro_step: MicroStep | None = None
    """What the loop body works on just now; None outside of an AdaptiveDataLoader."""
    loop: object | None = None
    """The loader that is looped over just now."""
    scale: float = 1.0
    """Batch size over initial batch size, which the learning rate follows."""
    num_microbatches: int = 1
    """Micro-batches M of the model in training."""
    fewest_samples: int = 1
    """Samples that each micro-batch keeps where M is chosen: more where layers normalise over it.
    """
    microbatches_follow: bool = False
    """Whether M follows the goodput; else the script decides on it."""
    proposed_microbatches: int = 0
    """M that the goodput model proposed last; 0 before it did."""
    checkpoint_mode: Checkpoint = "never"
    """Which of them are recomputed."""
    loss_scale: Tensor | None = None
    """What a GradScaler multiplied the loss of the coming backward by."""
    looked_for_checkpoint: bool = False
    """Whether the replicas agreed already on the checkpoint to restore from."""
    restored_from: Path | None = None
    """The checkpoint that this run restores from; None for a fresh start."""
    background_save: BackgroundSave = field(default_factory=BackgroundSave)
    """Writes checkpoints beside the training."""
    devices: tuple[torch.device, ...] = ()
    """The devices of this replica's stages."""
    closers: list[Callable[[], None]] = field(default_factory=list)
    """Called when the context ends, last one first."""
    _metrics: Metrics | None = None
    _reporter: Reporter | None = None
    _tracer: Tracer | None = None

    @property
    def metrics(self) -> Metrics:
        """Measurements and progress of the job."""
        if self._metrics is None:
            from .metrics import Metrics  # imports this module

            self._metrics = Metrics(self)
        return self._metrics

    @property
    def step(self) -> int:
        """Optimizer steps of the whole training; does not make the metrics."""
        return self._metrics.step if self._metrics is not None else 0

    @property
    def unsaved(self) -> bool:
        """Whether steps were taken since the last checkpoint, or since this run began."""
        return self._metrics is not None and self._metrics.step != self._metrics.saved_step

    def note_saved(self) -> None:
        """All states are on the disk as they are now."""
        if self._metrics is not None:
            self._metrics.saved_step = self._metrics.step

    @property
    def reporter(self) -> Reporter:
        """Sends hints and progress to the scheduler."""
        if self._reporter is None:
            from .reporter import Reporter  # imports this module

            self._reporter = Reporter(self)
            self.closers.append(self._reporter.close)
            if self.env.tensorboard_dir is not None and self.env.rank == 0:
                from .scalars import TensorBoard  # with the others

                TensorBoard(self.env.tensorboard_dir, self._reporter)
        return self._reporter

    def pause_progress(self) -> None:
        """A loop over a loader ended, and the script goes on behind it."""
        if self._reporter is not None:
            self._reporter.pause_progress()

    def finish_progress(self) -> None:
        """A loop over epochs ended."""
        if self._reporter is not None:
            self._reporter.finish_progress()

    @property
    def tracer(self) -> Tracer:
        """Writes time lines of steps."""
        if self._tracer is None:
            from .trace import Tracer  # with the others

            self._tracer = Tracer(self.env)
        return self._tracer

    def start_heartbeat(self) -> None:
        """Begin to tell the scheduler, if there is one, that this replica is alive."""
        heartbeat = Heartbeat.start(self.env, lambda: self._metrics.step if self._metrics else None)
        if heartbeat is not None:
            self.closers.append(heartbeat.close)  # the first, so that it ends last

    def close(self) -> None:
        """End what runs in the background."""
        while self.closers:
            self.closers.pop()()
        self.background_save.wait()
        self.control.close()


_context: JobContext | None = None


def context(timeout: float = PEER_TIMEOUT) -> JobContext:
    """The context of this process, made from the environment at the first call.

    Args:
        timeout: Seconds to wait for silent peers; the first call decides.

    Raises:
        ConfigurationError: There are other replicas, and the script has not joined them yet.
    """
    global _context
    if _context is None:
        env = JobEnvironment.read()
        if env.num_replicas > 1 and not dist.is_initialized():
            raise ConfigurationError(
                f"this is replica {env.rank} of {env.num_replicas}, which has not met the others: "
                "call pipollux_hybrid.init_process_group() at the beginning of the script"
            )
        control = ControlPlane(env.num_replicas, timeout)
        agree(control, "their environment", environment_settings(env))
        _context = JobContext(env=env, control=control)
        _context.start_heartbeat()
    return _context


def current() -> JobContext | None:
    """The context of this process if there is one; does not make it."""
    return _context


def reset() -> None:
    """End the context; the next call of :func:`context` makes a new one."""
    global _context
    if _context is not None:
        _context.close()
    _context = None
    interrupt.reset()
