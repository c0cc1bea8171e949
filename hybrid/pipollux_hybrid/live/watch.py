"""The thread that looks at the rendezvous: who wants to join or leave, what is proposed.

Replica 0 proposes memberships; every replica forms the groups of what is proposed, beside the
training.
"""

from __future__ import annotations

import logging
import socket
import threading
import time

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.membership import Bulletin, JobPlace, Membership, Newcomer
from pipollux_hybrid.telemetry.metrics import Metrics

from .forming import PATIENCE, Forming
from .meeting_folder import MeetingFolder

__all__ = ["INTERVAL", "MembershipWatch"]

_LOG = logging.getLogger(__name__)
INTERVAL = 0.25
"""Seconds between two looks."""
RETRY_AFTER = 15.0
"""Seconds after a membership that did not come about in which nobody joins: each try may cost those
who train some seconds."""


class MembershipWatch:
    """What a replica knows of who takes part, and of what is about to change.

    Args:
        ctx: The job's context.
        rendezvous: Where replicas that come later find the job.
        membership: Who takes part; None for a newcomer.
        replica: The id of this replica.
        timeout: Seconds that replicas wait for each other.
    """

    def __init__(
        self,
        ctx: JobContext,
        rendezvous: MeetingFolder,
        membership: Membership | None,
        replica: str,
        timeout: float,
    ) -> None:
        self.rendezvous = rendezvous
        self.membership = membership
        """Who takes part; None before this replica does."""
        self.replica = replica
        self.timeout = timeout
        self.place = JobPlace(0, 0)
        """Where in its script this replica is."""
        self.parked = False
        """Whether it is a newcomer that waits there."""
        self.forming: Forming | None = None
        """What is about to come about."""
        self._context = ctx
        self._highest = membership.number if membership else 0
        self._not_before = 0.0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipollux-live", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and take back what this replica has asked for."""
        self._ending.set()
        self._thread.join()
        self.rendezvous.withdraw(self.replica)
        if self.membership is not None and self.membership.rank(self.replica) == 0:
            self.rendezvous.retract()
        if self.forming is not None:
            self.forming.drop()

    def give_up(self, forming: Forming) -> None:
        """Let go of a membership that does not come about."""
        self._not_before = time.monotonic() + RETRY_AFTER
        self._forget(forming)
        forming.drop()

    def enter(self, forming: Forming) -> None:
        """Take part in a membership that has come about."""
        self._forget(forming)
        self.parked, self.membership = False, forming.membership
        self.rendezvous.withdraw(self.replica)

    def _forget(self, forming: Forming) -> None:
        if self.forming is forming:  # else the thread knows of another already
            self.forming = None

    def _run(self) -> None:
        while not self._ending.wait(INTERVAL):
            try:
                self._look()
            except OSError as error:  # of the folder; the next time it may be there
                _LOG.debug("%s", error)
            except Exception:  # the next look may go better
                _LOG.exception("replicas cannot join or leave")

    def _look(self) -> None:
        if self.membership is None:
            me = Newcomer(self.replica, socket.gethostname(), self.parked, self.place)
            self.rendezvous.apply(me)
        elif self.membership.rank(self.replica) == 0:
            self._lead(self.membership)
        proposal = self.rendezvous.proposal()
        if proposal is None or proposal.number <= self._highest:
            return
        current = self.membership
        if proposal.rank(self.replica) is None and current is None:
            return
        self._highest = proposal.number
        if current is not None and proposal.replicas == current.replicas:
            self.forming = None  # who wanted to come or go does not any more
        else:
            self.forming = Forming(proposal, self.replica, self.rendezvous, self.timeout)

    def _lead(self, current: Membership) -> None:
        """Tell newcomers where the job is, and propose what they and others have asked for."""
        cut = self._context.component(Metrics).cut
        balance = tuple(cut.balance) if cut is not None else ()
        self.rendezvous.post(Bulletin(current, self.place, balance))
        if cut is None:
            return
        wanted = self._wanted(current)
        forming = self.forming
        proposed = current.replicas if forming is None else forming.membership.replicas
        given_up = forming is not None and (
            forming.failure is not None
            or (not forming.formed and time.monotonic() - forming.began_at > PATIENCE)
        )
        latest = self.rendezvous.proposal()
        if latest is not None and latest.number > self._highest:
            return  # this replica has not yet looked at what it proposed last
        if wanted != proposed or given_up:
            self.rendezvous.propose(Membership(self._highest + 1, wanted))

    def _wanted(self, current: Membership) -> tuple[str, ...]:
        leaving = self.rendezvous.leavers()
        staying = [replica for replica in current.replicas if replica not in leaving]
        if not staying:  # the last ones stop, instead, as anybody can ask them to
            return current.replicas
        coming = [x.replica for x in self.rendezvous.newcomers() if x.parked]
        coming = coming if time.monotonic() >= self._not_before else []
        wanted = (*staying, *(x for x in coming if x not in current.replicas))
        limits = self._context.batch.limits
        try:
            if limits is not None:
                limits.check(len(wanted))
        except ConfigurationError:
            return current.replicas  # batches cannot be cut for so many, or so few
        return wanted
