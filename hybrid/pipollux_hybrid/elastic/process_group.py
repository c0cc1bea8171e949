"""Joining the other replicas.

One process is one pipeline replica and drives all devices of its stages; torchrun starts the
processes and tells each its rank. Without torchrun a script is a job of one replica.
"""

from __future__ import annotations

import atexit
from datetime import timedelta

import torch
import torch.distributed as dist

from pipollux_hybrid.checkpoint.manager import checkpoint_to_restore
from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job import signals
from pipollux_hybrid.job.env import JobEnvironment
from pipollux_hybrid.telemetry.metrics import Metrics

from .step_boundary import acknowledge

__all__ = ["destroy_process_group", "init_process_group", "num_replicas", "replica_rank"]


def init_process_group(
    backend: str | None = None, *, timeout: float = contexts.PEER_TIMEOUT
) -> None:
    """Join the replicas of this job; the first call of a script that uses Pipollux.

    Under torchrun it blocks until all replicas have joined. Run by hand it makes a job of one
    replica. It compares the replicas' settings and tests the folder of checkpoints. From here on
    SIGTERM and Ctrl-C request a stop at the next step boundary.

    Args:
        backend: The library that sends gradients: ``"nccl"`` or ``"gloo"``; by default NCCL
            where there are CUDA devices, else gloo.
        timeout: Seconds to wait for a slow replica, here and in every collective, where
            ``PIPOLLUX_TIMEOUT`` does not say. A host that is lost is found sooner, after the
            seconds of ``PIPOLLUX_HOST_TIMEOUT``.

    Raises:
        ConfigurationError: The environment is not what torchrun sets, differs between replicas,
            or the backend is unknown.
        CheckpointError: ``PIPOLLUX_CHECKPOINT_DIR`` cannot be written or is not shared, or there
            are checkpoints but none that this job can resume from.
    """
    env = JobEnvironment.read()
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if chosen not in ("nccl", "gloo"):
        raise ConfigurationError(f"backend={backend!r}: 'nccl' and 'gloo' are allowed")
    if env.num_replicas > 1 and not env.under_torchrun:
        raise ConfigurationError(
            f"WORLD_SIZE={env.num_replicas} but MASTER_ADDR or RANK is not set: start the script "
            "with torchrun, which sets them"
        )
    if env.num_threads is not None:
        torch.set_num_threads(env.num_threads)
    # Until handlers are there a signal ends the process: there is nothing to lose yet.
    timeout = env.timeout or timeout
    if env.num_replicas > 1 and not dist.is_initialized():
        dist.init_process_group(chosen, timeout=timedelta(seconds=timeout))
    atexit.register(destroy_process_group)
    ctx = contexts.context(timeout)
    checkpoint_to_restore(ctx)
    ctx.component(Metrics)  # made here, so that a stop before there is a model knows the step
    signals.install_handlers(acknowledge)


def destroy_process_group() -> None:
    """Leave the job: end background work and collectives. Called automatically at exit."""
    contexts.reset()
    if dist.is_initialized():
        dist.destroy_process_group()


def num_replicas() -> int:
    """Return the number R of pipeline replicas of this job."""
    return contexts.context().env.num_replicas


def replica_rank() -> int:
    """Return the index r of this pipeline replica, from 0 to R - 1."""
    return contexts.context().env.rank
