"""Joins the replicas of a job.

One process is one pipeline replica (single-process pipeline) or one of its stages (multi-process
pipeline). Without torchrun, which sets their ranks, a script is a job of one replica.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from pipollux_hybrid.checkpoint.manager import checkpoint_to_restore, note_end
from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job import device_groups, nccl, signals
from pipollux_hybrid.job.agreement import agree_by_store
from pipollux_hybrid.job.env import JobEnvironment
from pipollux_hybrid.job.groups import register_backend
from pipollux_hybrid.job.membership import Announcement
from pipollux_hybrid.resize.elastic_membership import find_job, start_elastic_membership
from pipollux_hybrid.resize.rendezvous_folder import RendezvousFolder
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_protocol import environment as variables

from .epoch import have_ended
from .step_boundary import acknowledge

if TYPE_CHECKING:
    from pipollux_hybrid.resize.scheduler_rendezvous import SchedulerRendezvous


_meetings = itertools.count()
"""Numbers of the jobs of this process."""


def init_process_group(
    backend: str | None = None,
    *,
    timeout: float = contexts.PEER_TIMEOUT,
    processes_per_replica: int | None = None,
) -> None:
    """Join the replicas of this job; the first call of a script that uses Pipollux.

    Under torchrun it blocks until all replicas have joined; without it the job has one replica. It
    compares the replicas' settings and tests the checkpoint directory. From here on SIGTERM and
    Ctrl-C request a stop at the next step boundary. With ``PIPOLLUX_RENDEZVOUS`` a script that is
    started while a job uses this folder joins that job, in its current loop.

    Args:
        backend: The library that sends gradients: ``"nccl"`` or ``"gloo"``; by default NCCL if
            there are CUDA devices, else gloo. On MIG slices, which NCCL does not support, gloo.
            NCCL is torch's ``ProcessGroupNCCL``, which torch 2.14 and newer name ``nccl-legacy``;
            groups of ``nccl`` send tensors of only one device of a process from 2.15 on.
        timeout: Seconds to wait for a slow replica, here and in every collective, unless
            ``PIPOLLUX_TIMEOUT`` is set. A lost host is detected sooner, after
            ``PIPOLLUX_HOST_TIMEOUT`` seconds.
        processes_per_replica: Processes per pipeline replica: 1 for a single-process pipeline, or
            the number of stages; torchrun must start this number, or a multiple, on every node. A
            scheduler's choice (``PIPOLLUX_PROCESSES_PER_REPLICA``) takes precedence.

    Raises:
        ConfigurationError: The environment is not that of torchrun, differs between replicas, or
            the backend is unknown, or NCCL on MIG slices.
        ConfigurationError: ``PIPOLLUX_RENDEZVOUS`` is set, and a scheduler runs the job, the
            backend is NCCL without ``PIPOLLUX_ELASTIC_NCCL``, or this attempt does not match the
            job in the folder: it has several replicas, or another number of processes per replica.
        ConfigurationError: A scheduler started this replica to join a job, and it cannot join.
        CheckpointError: ``PIPOLLUX_CHECKPOINT_DIR`` is not writable or not shared, or none of its
            checkpoints can be restored.
    """
    env = JobEnvironment.read(processes_per_replica=processes_per_replica)
    on_slice = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
    chosen = backend or ("nccl" if torch.cuda.is_available() and not on_slice else "gloo")
    if chosen == "nccl" and on_slice and env.world_size > 1:
        raise ConfigurationError(
            "backend='nccl': NCCL does not support MIG slices, on which this replica runs; leave "
            "backend out, or give 'gloo'"
        )
    if chosen not in ("nccl", "gloo"):
        raise ConfigurationError(f"backend={backend!r}: 'nccl' and 'gloo' are allowed")
    if env.world_size > 1 and not env.under_torchrun:
        raise ConfigurationError(
            f"WORLD_SIZE={env.num_replicas} but MASTER_ADDR or RANK is not set: start the script "
            "with torchrun, which sets them"
        )
    if env.num_threads is not None:
        torch.set_num_threads(env.num_threads)
    # A signal ends the process until the handlers are installed: there is nothing to lose yet.
    timeout = env.timeout or timeout
    settings = _settings_of_groups(env, chosen)
    store = None
    if env.world_size > 1 and not dist.is_initialized():
        store = _meet(settings, timeout, env)
    rendezvous = _rendezvous(env, chosen)
    announcement = None
    if isinstance(rendezvous, RendezvousFolder):
        announcement = find_job(rendezvous, env) if env.leads else None
    elif rendezvous is not None:
        announcement = rendezvous.find_job()
    if chosen == "nccl" and rendezvous is not None:
        device_groups.use(chosen, timeout)
        register_backend()
        chosen = device_groups.BACKEND
    elif chosen == "nccl":
        chosen = nccl.name_for_several_devices()
    if store is not None:
        wait, (rank, size) = timedelta(seconds=timeout), (env.world_rank, env.world_size)
        dist.init_process_group(chosen, store=store, rank=rank, world_size=size, timeout=wait)
    atexit.register(destroy_process_group)
    if rendezvous is not None and env.processes_per_replica > 1:
        announcement = _told(announcement)
    if announcement is not None:
        joining_replica = replace(env, rank=len(announcement.membership.replicas))
        ctx = contexts.join(joining_replica, announcement, timeout)
    else:
        ctx = contexts.context(timeout, env)
    ctx.control.settings |= settings  # which a joining replica compares with its own
    checkpoint_to_restore(ctx)
    ctx.component(Metrics)  # so that a stop before the model is created has the step
    if rendezvous is not None and not isinstance(rendezvous, RendezvousFolder):
        rendezvous.ride(ctx.heartbeat)
    if rendezvous is not None:
        start_elastic_membership(ctx, rendezvous, timeout)
    signals.install_handlers(acknowledge)


def _settings_of_groups(env: JobEnvironment, backend: str) -> dict[str, str | None]:
    """Return the settings without which processes would form different groups."""
    elastic = env.rendezvous is not None or (env.elastic and env.attempt > 0)
    over_nccl = elastic and backend == "nccl" and env.elastic_nccl
    return {
        "the backend": backend,
        variables.RENDEZVOUS.name: None if env.rendezvous is None else "set",
        variables.ELASTIC_NCCL.name: "1" if over_nccl else None,
    }


def _meet(settings: Mapping[str, str | None], timeout: float, env: JobEnvironment) -> Store:
    """Meet all processes in torchrun's store, and return it; a ConfigurationError if they would
    form different groups, which else wait for each other until their timeout. Replicas that push
    and pull form a group each.
    """
    wait = timedelta(seconds=timeout)
    number = next(_meetings)
    if number and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigurationError(
            "init_process_group() was called again, after destroy_process_group(), in a job of "
            "several processes that torchrun did not start, and only under torchrun can they meet "
            "again: use it, or train each model in processes of its own"
        )
    store, rank, size = next(torch_rendezvous("env://", timeout=wait))
    store.set_timeout(wait)
    if env.servers is not None:
        store = PrefixStore(f"replica_{env.replica}", store)
        rank, size = env.stage, env.processes_per_replica
    agree_by_store(store, rank, size, "their process groups", settings)
    # The addresses of an earlier job of these processes are still in the store.
    return PrefixStore(f"default_pg_{number}" if number else "default_pg", store)


def _rendezvous(env: JobEnvironment, backend: str) -> RendezvousFolder | SchedulerRendezvous | None:
    """Return the rendezvous of an elastic job; None: the job is not elastic."""
    if env.servers is not None:
        return None  # replicas join and leave at the servers
    if env.rendezvous is None:
        can = backend == "gloo" or (env.elastic_nccl and not dist.is_initialized())
        if not (env.elastic and env.attempt > 0 and can):
            if env.joins:  # it would train by itself
                raise ConfigurationError(
                    "PIPOLLUX_JOINS is 1, and this replica cannot join a job: that takes "
                    "PIPOLLUX_ELASTIC=1, PIPOLLUX_ATTEMPT, and the backend 'gloo', or 'nccl' with "
                    "PIPOLLUX_ELASTIC_NCCL=1 and without torch's init_process_group"
                )
            return None
        from pipollux_hybrid.resize.scheduler_rendezvous import (
            SchedulerRendezvous,  # imports pydantic
        )

        meeting = SchedulerRendezvous(env)
        return None if meeting.is_deaf else meeting
    if env.attempt:
        raise ConfigurationError(
            "PIPOLLUX_RENDEZVOUS is set, and a scheduler runs this job: it decides how many "
            "replicas there are; remove the variable"
        )
    if backend == "nccl" and not env.elastic_nccl:
        raise ConfigurationError(
            "PIPOLLUX_RENDEZVOUS is set, and the backend is 'nccl': elastic resizes over NCCL are "
            "experimental, so set PIPOLLUX_ELASTIC_NCCL=1, or call init_process_group('gloo')"
        )
    if backend == "nccl" and dist.is_initialized():
        raise ConfigurationError(
            "PIPOLLUX_RENDEZVOUS is set, and torch.distributed is initialized already: an elastic "
            "job over NCCL forms its own groups, so remove torch's init_process_group"
        )
    return RendezvousFolder(env.rendezvous)


def _told(announcement: Announcement | None) -> Announcement | None:
    """Broadcast the first process's announcement to the processes started with it."""
    found = [None if announcement is None else announcement.to_json_object()]
    dist.broadcast_object_list(found, src=0)
    return None if found[0] is None else Announcement.from_json_object(found[0])


def destroy_process_group() -> None:
    """Leave the job: end background work and collectives. Called automatically at exit."""
    ctx = contexts.current()
    watch = None if ctx is None else ctx.watch
    if ctx is not None and have_ended(ctx):
        note_end(ctx)
    failed = getattr(sys, "last_value", None) is not None
    if watch is not None and (failed or watch.gone()):
        device_groups.abort_all()  # which else wait for those that are gone, or do not end here
    contexts.reset()
    if dist.is_initialized():
        try:
            dist.destroy_process_group()
        except RuntimeError:
            if device_groups.in_use() is None:
                raise
            device_groups.abort_all()  # the others have not come to their end in time
            dist.destroy_process_group()
    device_groups.forget()
    if watch is not None:
        watch.leave()


def num_replicas() -> int:
    """Return the number R of pipeline replicas of this job; it changes with elastic resizes.

    A replica that has not joined yet counts only itself. Replicas that push and pull count those
    of their start, which torchrun or the scheduler starts together.
    """
    env = contexts.context().env
    return env.num_replicas if env.servers is None else env.expected_replicas


def device_mesh() -> DeviceMesh:
    """Return torch's mesh of the R·K processes, with dimensions ``replica`` and ``stage``.

    For a script's own collectives. An elastic resize replaces it.

    Example::

        dist.all_reduce(tensor, group=pipollux.device_mesh().get_group("replica"))

    Raises:
        ConfigurationError: The job has single-process pipelines.
    """
    mesh = contexts.context().mesh
    if mesh is None:
        raise ConfigurationError(
            "there is no device mesh where one process drives all stages of a replica: the default "
            "group is that of the replicas (a process for each stage: processes_per_replica=K)"
        )
    return mesh.device_mesh


def process_rank() -> int:
    """Return the rank of this process in the job.

    In a multi-process pipeline these are R·K ranks, replica r's from r·K on; in a single-process
    pipeline this is :func:`replica_rank`. Rank 0 should print.
    """
    env = contexts.context().env
    return replica_rank() * env.processes_per_replica + env.stage


def replica_rank() -> int:
    """Return the index r of this pipeline replica, from 0 to R - 1; it may change with R.

    A replica that has not joined yet has the next free index. Replicas that push and pull keep
    ``PIPOLLUX_REPLICA``.
    """
    env = contexts.context().env
    return env.rank if env.servers is None else env.replica
