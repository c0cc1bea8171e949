"""Which replicas push and pull, for the scheduler, with the heartbeats of each.

The scheduler starts and stops single replicas of such a job: they join and leave at the servers,
and no other replica waits for it. The messages are those of elastic resizes. A joining replica
reports that it is ready once it has the parameters. Replica 0 reports for all: that the job can be
resized, that a proposed membership holds, and which replicas the servers have lost.
"""

from __future__ import annotations

import threading

from pipollux_hybrid.job.context import JobContext
from pipollux_protocol.messages import ElasticStatus, HeartbeatAnswer

from .key_range import Place


class Presence:
    """A payload of heartbeats (`HeartbeatPayload`), for a replica that has joined at the servers.

    Args:
        ctx: The context of the job.
        num_layers: Layers of the model.
        place: Epoch and loop at which it has joined.
    """

    def __init__(self, ctx: JobContext, num_layers: int, place: Place) -> None:
        self._context, self._place = ctx, place
        self._num_layers = num_layers
        self._lock = threading.Lock()
        env = ctx.env
        self._number = 0 if env.joins else 1
        self._replicas = () if env.joins else tuple(range(env.expected_replicas))
        """Ids of the replicas in that membership."""
        self._seen: set[int] = set()
        """Replicas that have joined at the servers."""
        if ctx.heartbeat is not None:
            ctx.heartbeat.rider = self
            ctx.heartbeat.wake()

    def told(self) -> ElasticStatus:
        """Return the status for the scheduler."""
        env, (epoch, loop) = self._context.env, self._place
        with self._lock:
            if env.reports:
                self._note_losses()
            return ElasticStatus(
                membership=self._number,
                replicas=self._replicas if self._number > 1 else (),
                waiting_to_join=self._number == 0,
                epoch=epoch,
                loop=loop,
                balance=(self._num_layers,) if env.reports else (),
                fixed=len(env.servers or ()),
                step=self._context.step,
                seconds=0.0 if self._number > 1 else None,
            )

    def take(self, answer: HeartbeatAnswer) -> float | None:
        """Adopt the membership that the scheduler proposes: the replicas of it are here already."""
        proposal = answer.proposal
        if proposal is not None and str(self._context.env.replica) in proposal.replicas:
            with self._lock:
                new = proposal.number > self._number
                if new:
                    self._number = proposal.number
                    self._replicas = tuple(map(int, proposal.replicas))
            if new and self._context.heartbeat is not None:
                self._context.heartbeat.wake()
        return answer.again

    def _note_losses(self) -> None:
        """Begin a membership without replicas that the servers have lost."""
        there = self._context.at_servers
        present = set() if there is None else set(there.replicas)
        self._seen |= present
        lost = [x for x in self._replicas if x in self._seen and x not in present]
        if lost and self._context.env.replica in present:
            self._number += 1
            self._replicas = tuple(x for x in self._replicas if x not in lost)
