"""Going over to other groups, and to the state that a restart would be in."""

from __future__ import annotations

import socket
from dataclasses import replace

from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.groups import become_default, held_groups
from pipollux_hybrid.telemetry.metrics import Metrics

from .forming import Forming
from .watch import MembershipWatch

__all__ = ["go_on", "switch"]


def switch(ctx: JobContext, watch: MembershipWatch, forming: Forming) -> None:
    """Go over to the groups of another membership; all of its replicas call it."""
    rank, process, mesh = forming.rank, forming.process, ctx.mesh
    size = len(forming.membership.replicas)
    assert rank is not None and process is not None and forming.store  # noqa: S101, PT018  # formed
    watch.retire([*held_groups(), ctx.control.group])
    become_default(forming.gradients, forming.store, forming.name, process)
    if mesh is not None and forming.mesh_groups is not None:
        mesh.rejoin(forming.mesh_groups, rank)
    ctx.rejoin(replace(ctx.env, rank=rank, num_replicas=size), forming.control, watch.timeout)
    hosts = ctx.control.gather_bytes(socket.gethostname().encode())
    num_nodes = forming.membership.num_nodes or len(set(hosts))
    ctx.env = replace(ctx.env, num_nodes=num_nodes)
    if ctx.env.leads:
        watch.rendezvous.remove_store(forming.membership.number)


def go_on(ctx: JobContext, forming: Forming, *, joined: bool) -> None:
    """Bring what no state holds to where a restart would bring it; all replicas call it.

    Args:
        ctx: The job's context.
        forming: What has been made ready.
        joined: Whether there are newcomers among them.
    """
    ctx.component(Metrics).rejoin()
    ctx.batch.proposed_microbatches = 0
    for state in ctx.component(States).values():
        state.rejoined()
    for call in (*forming.ready, *ctx.rejoined, *(ctx.joined if joined else ())):
        call()
