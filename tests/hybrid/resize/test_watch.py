"""What replica 0 proposes while the replicas go over to a membership, some sooner than others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipollux_hybrid.job.context import context
from pipollux_hybrid.job.membership import JobPlace, JoiningReplica, Membership
from pipollux_hybrid.partition.balance import Partitioning
from pipollux_hybrid.resize.pending_membership import PendingMembership
from pipollux_hybrid.resize.rendezvous_folder import RendezvousFolder
from pipollux_hybrid.resize.watch import MembershipWatch
from pipollux_hybrid.telemetry.metrics import Metrics

BEFORE, AFTER = Membership(11, ("old",)), Membership(12, ("old", "new"))


class Folder(RendezvousFolder):
    """A folder that does something else after it has been asked for joining replicas."""

    def then(self) -> None:
        """Nothing, for now."""

    def joining(self) -> list[JoiningReplica]:
        found = super().joining()
        self.then()
        return found


class FormedMembership(PendingMembership):
    """A membership whose replicas have met, without any."""

    def __init__(self, membership: Membership, folder: RendezvousFolder) -> None:
        super().__init__(Membership(membership.number, ()), "old", folder, 60.0)
        self.membership, self.rank, self.formed = membership, 0, True


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[MembershipWatch]:
    """Replica 0, which has formed a membership with a joining replica; its thread does not look."""
    ctx, folder = context(), Folder(tmp_path)
    ctx.component(Metrics).cut = Partitioning([1], None, None, [1])
    watch = MembershipWatch(ctx, folder, BEFORE, "old", 60.0)
    watch.suspend()
    watch.pending = FormedMembership(AFTER, folder)
    watch._highest = AFTER.number
    folder.apply(JoiningReplica("new", "host", waiting_to_join=True, place=JobPlace(0, 0)))
    yield watch
    watch.close()


def look(watch: MembershipWatch) -> Membership | None:
    """What replica 0 has proposed after a look of its thread."""
    watch._lead(BEFORE)
    return watch.rendezvous.proposal()


def test_one_that_does_not_want_to_join_any_more_is_left_out(watch: MembershipWatch) -> None:
    assert look(watch) is None
    watch.rendezvous.withdraw("new")
    assert look(watch) == Membership(13, BEFORE.replicas)


def test_a_joining_replica_that_has_gone_over_first_is_not_left_out(watch: MembershipWatch) -> None:
    watch.changing = True
    watch.rendezvous.withdraw("new")
    assert look(watch) is None


def test_nothing_is_proposed_of_a_membership_that_is_over(watch: MembershipWatch) -> None:
    """The look began before the joining replica had gone over, and ends after replica 0 has."""
    pending, folder = watch.pending, watch.rendezvous
    assert pending is not None
    assert isinstance(folder, Folder)
    folder.then = lambda: watch.enter(pending)  # type: ignore[method-assign]  # once
    folder.withdraw("new")
    assert look(watch) is None
    assert watch.membership == AFTER


def test_whoever_leaves_does_not_ask_to_join(watch: MembershipWatch) -> None:
    folder = watch.rendezvous
    folder.withdraw("new")
    watch.leave()
    assert watch.membership is None
    watch.close()
    assert isinstance(folder, Folder)
    assert folder.joining() == []
