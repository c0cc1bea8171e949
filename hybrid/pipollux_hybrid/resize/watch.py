"""The thread that polls the rendezvous for requests and proposals.

Replica 0 proposes memberships; every replica forms the groups of a proposal during training.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from contextlib import nullcontext
from typing import Any

from torch._C._distributed_c10d import Store

from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.errors import ConfigurationError, PeerLostError
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.groups import release
from pipollux_hybrid.job.membership import Announcement, JobPlace, JoiningReplica, Membership
from pipollux_hybrid.telemetry.metrics import Metrics

from .alignment import in_common
from .eligibility import why_not_elastic
from .log import say
from .pending_membership import PATIENCE, PendingMembership
from .published_totals import PublishedTotals
from .rendezvous import Rendezvous
from .signs_of_life import SignsOfLife
from .skeleton import Spare
from .transfer import outline, prepare

_LOG = logging.getLogger(__name__)
INTERVAL = 0.25
"""Polling interval in seconds."""
CLOSE_TIMEOUT = 1.0
"""Seconds that the end of the job waits for unused groups to close."""
RETRY_AFTER = 15.0
"""Seconds after a failed resize in which nobody joins: each attempt may pause training."""


class MembershipWatch:
    """A replica's view of the current and the pending membership."""

    def __init__(
        self,
        ctx: JobContext,
        rendezvous: Rendezvous,
        membership: Membership | None,
        replica: str,
        timeout: float,
    ) -> None:
        self.rendezvous = rendezvous
        self.membership = membership
        """None while this replica is no member."""
        self.replica = replica
        self.timeout = timeout
        self.place = JobPlace(0, 0)
        """This replica's position in its script."""
        self.loop = ""
        self.waiting_to_join = False
        """Whether it is a joining replica that waits at :attr:`place`."""
        self.store: Store | None = None
        """The store of the current membership; it exists while its host holds this reference."""
        self.pending: PendingMembership | None = None
        self.changing = False
        """Whether a resize is in progress, which replicas complete at different times."""
        self.speaks = ctx.env.stage == 0
        """Whether this process, as the first one, communicates for its replica."""
        self.totals = PublishedTotals(rendezvous.folder)
        self.refused: ConfigurationError | None = None
        """Why this job must not train: another one does in its place."""
        self._context = ctx
        self._highest = membership.number if membership else 0
        self._not_before = 0.0
        self._signs = SignsOfLife(ctx.env.frozen_timeout)
        self._looking = threading.Lock()
        self._suspended = False
        self._retired: list[Any] = []
        self._said: set[str] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipollux-elastic", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and withdraw this replica's requests."""
        self._ending.set()
        self._thread.join()
        release(self._retired).join(CLOSE_TIMEOUT)
        if self.speaks:
            self.rendezvous.withdraw(self.replica)
        if self._leads(self.membership) and not self._ends_alone() and self.refused is None:
            self.rendezvous.retract()
        if self.pending is not None:
            self.pending.drop()

    def give_up(
        self, pending: PendingMembership, why: str = "a replica was lost on the way"
    ) -> None:
        """Drop a membership that was not entered."""
        self._not_before = time.monotonic() + RETRY_AFTER
        self._forget(pending)
        pending.drop()
        self._refuse(pending.membership, why)

    def tell_entered(self, membership: Membership, seconds: float) -> None:
        """Report that this replica has entered a membership, and the pause in seconds."""
        if self.speaks:
            self.rendezvous.entered(membership, self._context.step or 0, seconds)

    def enter(self, pending: PendingMembership) -> None:
        """Make a pending membership the current one."""
        # A poll in progress would make a joining replica apply once more.
        with self._looking if self.membership is None else nullcontext():
            self._forget(pending)
            self.waiting_to_join, self.membership, self.store = (
                False,
                pending.membership,
                pending.store,
            )
            # A request to leave that has arrived meanwhile remains.
            if self.speaks:
                self.rendezvous.withdraw_application(self.replica)

    def leave(self) -> None:
        """Leave the membership."""
        with self._looking:
            self._suspended, self.membership = True, None

    def retire(self, groups: list[Any]) -> None:
        """Release unused groups a little later in another thread, as closing them takes time."""
        self._retired += groups

    @property
    def newest(self) -> int:
        """The highest number of a membership that this replica knows."""
        return self._highest

    def suspend(self) -> None:
        """Stop proposing and forming memberships: replicas were lost."""
        with self._looking:
            self._suspended = True
            pending, self.pending = self.pending, None
        if pending is not None:
            self.abandon(pending)

    def abandon(self, pending: PendingMembership) -> None:
        """Drop a membership in which a replica was lost, and its store."""
        pending.drop()
        if pending.process == 0:
            self.rendezvous.remove_store(pending.membership.number)

    def resume(self, pending: PendingMembership) -> None:
        """Continue with the surviving replicas in a membership that was entered."""
        self._highest = max(self._highest, pending.membership.number)
        self.enter(pending)
        self._suspended = False

    def _ends_alone(self) -> bool:
        """Return whether this replica ends alone: its script or one of its processes has failed."""
        env, peers = self._context.env, self._context.watch
        failure = getattr(sys, "last_value", None)
        gone = {rank // env.processes_per_replica for rank in peers.gone()} if peers else set()
        lost = type(failure) is PeerLostError  # all replicas raise it
        return env.num_replicas > 1 and (env.rank in gone or (failure is not None and not lost))

    def _leads(self, membership: Membership | None) -> bool:
        return self.speaks and membership is not None and membership.rank(self.replica) == 0

    def _refuse(self, membership: Membership, why: str, *, for_good: bool = False) -> None:
        if self.speaks:
            self.rendezvous.refuse(membership.number, why, for_good=for_good)

    def _forget(self, pending: PendingMembership) -> None:
        if self.pending is pending:  # else the thread has replaced it
            self.pending = None

    def _run(self) -> None:
        # States need it at the first resize; importing it then would make the others wait.
        from pipollux_perfmodel import perf_params_to_json  # noqa: F401  # imported ahead

        while not self._ending.wait(INTERVAL):
            if self._retired:
                release(self._retired)
            try:
                with self._looking:
                    if not self._suspended:
                        self._look()
                self._look_for_frozen()
            except OSError as error:  # of the folder, which may be available at the next poll
                _LOG.debug("%s", error)
            except ConfigurationError as error:  # raised in the main thread
                self.refused = error
            except Exception:  # the next poll may succeed
                _LOG.exception("replicas cannot join or leave")

    def _look(self) -> None:
        if self.membership is not None:
            self.rendezvous.follow()
        if self.membership is None and self.speaks:
            me = JoiningReplica(
                self.replica, socket.gethostname(), self.waiting_to_join, self.place
            )
            self.rendezvous.apply(me)
        elif self.membership is not None and self._leads(self.membership):
            self._lead(self.membership)
        pending = self.pending
        if pending is not None and pending.failed and not self.rendezvous.self_governed:
            self.give_up(pending, pending.failed)
        proposal = self.rendezvous.proposal()
        if proposal is None or proposal.number <= self._highest:
            return
        current = self.membership
        if proposal.rank(self.replica) is None and current is None:
            return
        if current is None and self._context.mesh is not None and not self.waiting_to_join:
            return  # the groups depend on the model, which does not exist yet
        self._highest = proposal.number
        if current is None:
            refusal = ""
        elif proposal.replicas == current.replicas:
            self.pending = None  # the requests were withdrawn
            return
        else:
            refusal = self.refusal(len(proposal.replicas))
        never = None if current is None else self._never(current, proposal.replicas)
        if refusal or never:
            self._refuse(proposal, never or refusal, for_good=never is not None)
        else:
            self.pending = PendingMembership(
                proposal,
                self.replica,
                self.rendezvous,
                self.timeout,
                self._context.mesh,
                outline=lambda: outline(self._context.component(States)),
                common=lambda: in_common(self._context, self.loop),
                prepare=self._prepare if current is None else None,
                prepares=self._context.prepares,
            )

    def _look_for_frozen(self) -> None:
        """Leave a sign of life, and detect processes that leave none."""
        members, peers = self.membership, self._context.watch
        if members is None or not self._signs.is_due():
            return
        env = self._context.env
        stages = range(env.processes_per_replica)
        everyone = [_process(replica, stage) for replica in members.replicas for stage in stages]
        me = _process(self.replica, env.stage)
        self.rendezvous.leave_sign(me)
        frozen = self._signs.look(self.rendezvous.signs(x for x in everyone if x != me))
        if peers is not None and not self._suspended:
            peers.note_frozen({everyone.index(x): frozen[x] for x in frozen})

    def _prepare(self, told: bytes) -> Spare:
        return prepare(told, self._context.component(States), PATIENCE / 4)

    def _lead(self, current: Membership) -> None:
        cut = self._context.component(Metrics).cut
        balance = tuple(cut.balance) if cut is not None else ()
        cannot = why_not_elastic(self._context, joins=True)
        processes = self._context.env.processes_per_replica
        fields = balance, cannot, processes, self._context.pipeline.schedule
        self.rendezvous.post(Announcement(current, self.place, *fields))
        self.totals.restore()
        if cut is None or not self.rendezvous.self_governed:
            return
        pending, joining = self.pending, time.monotonic() >= self._not_before
        wanted = self.rendezvous.wanted(current, joining=joining)
        never = self._never(current, wanted)
        if never is not None and never not in self._said:
            self._said.add(never)
            say(never)
        if never is not None or self.refusal(len(wanted)):
            wanted = current.replicas
        proposed = current.replicas if pending is None else pending.membership.replicas
        latest = self.rendezvous.proposal()
        if latest is not None and latest.number > self._highest:
            return  # this replica has not processed its last proposal yet
        if self.changing or self.membership is not current or self.pending is not pending:
            return  # replicas that have just joined have withdrawn their applications
        if wanted != proposed or (pending is not None and pending.failed):
            self.rendezvous.propose(Membership(self._highest + 1, wanted))

    def _never(self, current: Membership, wanted: tuple[str, ...]) -> str | None:
        """Return why this change of members needs a restart; None: it does not."""
        if set(wanted) == set(current.replicas):
            return None
        return why_not_elastic(self._context, joins=not set(wanted) <= set(current.replicas))

    def refusal(self, num_replicas: int) -> str:
        """Return why a batch cannot be divided over a number of replicas; empty: it can."""
        limits = self._context.batch.limits
        try:
            if limits is not None:
                limits.check(num_replicas)
        except ConfigurationError as error:
            return str(error)
        return ""


def _process(replica: str, stage: int) -> str:
    return f"{replica}-{stage}" if stage else replica
