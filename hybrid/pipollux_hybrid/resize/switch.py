"""Switches to the groups of another membership, and to the state that a restart would have."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.device_groups import abort_all
from pipollux_hybrid.job.groups import become_default, held_groups
from pipollux_hybrid.job.peers import lost_peers
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_perfmodel.errors import PipolluxError

from .pending_membership import PendingMembership
from .watch import MembershipWatch


def switch(ctx: JobContext, watch: MembershipWatch, pending: PendingMembership) -> None:
    """Switch to the groups of another membership; all of its replicas call it."""
    rank, process, mesh = pending.rank, pending.process, ctx.mesh
    size = len(pending.membership.replicas)
    assert rank is not None and process is not None and pending.store  # noqa: S101, PT018  # formed
    of_mesh = () if mesh is None else (mesh.replicas, mesh.stages, mesh.column, mesh.row)
    watch.retire([*held_groups(), ctx.control.group, *of_mesh])
    ctx.close_watch()  # which would take late news of old ranks for news of the next ones
    abort_all()  # all have reached the results of their last collectives
    become_default(pending.gradients, pending.store, pending.name, process)
    if mesh is not None and pending.mesh_groups is not None:
        mesh.rejoin(pending.mesh_groups, rank)
    ctx.rejoin(replace(ctx.env, rank=rank, num_replicas=size), pending.control, watch.timeout)
    hosts = ctx.control.gather_bytes(socket.gethostname().encode())
    num_nodes = pending.membership.num_nodes or len(set(hosts))
    level = pending.membership.network_level or ctx.network_level
    ctx.env = replace(ctx.env, num_nodes=num_nodes, network_level=level)
    if ctx.heartbeat is not None:
        ctx.heartbeat.network_level = None  # of the previous nodes
    if ctx.env.leads:
        watch.rendezvous.remove_store(pending.membership.number)


@contextmanager
def entering() -> Iterator[None]:
    """Raise a PeerLostError where the communication library fails in a switch: it cannot be undone,
    as others may be in the new groups already.
    """
    try:
        yield
    except PipolluxError:
        raise
    except RuntimeError as error:
        raise lost_peers("while entering the groups of a resize", error) from error


def go_on(ctx: JobContext, pending: PendingMembership, *, joined: bool) -> None:
    """Bring everything outside of states to where a restart would bring it, on all replicas."""
    ctx.component(Metrics).rejoin()
    ctx.batch.proposed_microbatches = 0
    for state in ctx.component(States).values():
        state.rejoined()
    for call in (*pending.ready, *ctx.rejoined, *(ctx.joined if joined else ())):
        call()
