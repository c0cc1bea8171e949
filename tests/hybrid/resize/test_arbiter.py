"""The folder in which those that are left find out who goes on."""

from __future__ import annotations

from pathlib import Path

from pipollux_hybrid.job.membership import Membership
from pipollux_hybrid.resize.arbiter import FolderArbiter
from pipollux_hybrid.resize.recovery import _yields

LOST = Membership(3, ("a", "b", "c"))


def test_the_first_decision_holds(tmp_path: Path) -> None:
    one, other = FolderArbiter(tmp_path), FolderArbiter(tmp_path)
    one.report(LOST, 0, "a", 5)
    other.report(LOST, 0, "c", 4)
    assert dict(one.reports(LOST, 0)) == {"a": 5, "c": 4}
    assert not one.reports(LOST, 1)
    assert other.decision(LOST, 0) is None
    one.decide(LOST, 0, Membership(6, ("a", "c")))
    other.decide(LOST, 0, Membership(6, ("c",)))
    assert other.decision(LOST, 0) == Membership(6, ("a", "c"))


def test_nobody_enters_what_another_one_has_given_up(tmp_path: Path) -> None:
    one, other = FolderArbiter(tmp_path), FolderArbiter(tmp_path)
    assert not one.conclude(Membership(6, ("a", "c")), enters=False)
    assert not other.conclude(Membership(6, ("a", "c")), enters=True)
    assert one.conclude(Membership(7, ("a", "c")), enters=True)
    assert other.conclude(Membership(7, ("a", "c")), enters=False), "and it ends"


def test_what_is_half_written_is_no_decision(tmp_path: Path) -> None:
    (tmp_path / "follows-3-0").touch()
    assert FolderArbiter(tmp_path).decision(LOST, 0) is None


def test_only_the_last_loss_is_kept(tmp_path: Path) -> None:
    arbiter = FolderArbiter(tmp_path)
    now = Membership(6, ("a", "c"))
    for lost, successor in ((LOST, now), (now, Membership(7, ("a",)))):
        arbiter.report(lost, 0, "a", 1)
        arbiter.decide(lost, 0, successor)
        arbiter.conclude(successor, enters=True)
        arbiter.clear(successor)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"lost-6-0-a", "follows-6-0", "outcome-7"}


def test_the_smaller_side_of_a_network_in_two_yields() -> None:
    assert _yields(["a"], ["b", "c"], LOST)
    assert not _yields(["b", "c"], ["a"], LOST)
    assert not _yields(["a"], ["b"], LOST)
    assert _yields(["b"], ["a"], LOST)
    assert not _yields(["c"], [], LOST)
