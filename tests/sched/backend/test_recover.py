"""What an earlier scheduler left running is ended, on any engine."""

from __future__ import annotations

import pytest

from pipollux_sched.backend import BackendError, Engine, ReplicaKey, base
from pipollux_sched.backend.base import Signal
from tests.sched.backend.cluster import Cluster, Replica, never

KEPT, LEFT, DONE = (ReplicaKey(job, 1, 0) for job in ("kept", "left", "done"))


class Abandoned(Cluster):
    """Replicas of an earlier scheduler, which do not save unless they `obey` as they are listed."""

    recover = Engine.recover  # type: ignore[assignment]  # not the one without signals

    def __init__(self) -> None:
        super().__init__(never)
        self.there = {key: Replica("a", (0,), runs=True) for key in (KEPT, LEFT, DONE)}
        self.end(DONE)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Abandoned:
    monkeypatch.setattr(base, "KILL_PATIENCE", 0.3)
    monkeypatch.setattr(base, "SIGNAL_INTERVAL", 0.1)
    return Abandoned()


def test_what_was_not_adopted_saves(cluster: Abandoned) -> None:
    """It is asked once more where the signal got lost; all of it is forgotten."""
    lost = ["lost", "silent"]

    def fault(what: str) -> str:
        if what == "listing":
            cluster.obey()
            return ""
        return lost.pop() if lost else ""

    cluster.fault = fault
    ends = []
    forget = cluster.forget
    cluster.forget = lambda *attempt: (  # type: ignore[method-assign]  # to see how it has ended
        ends.append(cluster.there[ReplicaKey(*attempt, 0)].ended),
        forget(*attempt),
    )[1]
    assert cluster.recover({KEPT[:2]}, 60.0) == ["replica 0 of job left"]
    assert lost == []
    assert [end and end.status for end in ends] == [0, 143]
    assert cluster.forgotten == [DONE[:2], LEFT[:2]]
    assert cluster.there.keys() == {KEPT}
    assert cluster.there[KEPT].told == set()


def test_what_does_not_save_is_killed(cluster: Abandoned) -> None:
    assert cluster.recover((), 0.2) == ["replica 0 of job kept", "replica 0 of job left"]
    assert cluster.there == {}
    assert cluster.recover((), 60.0) == []


def test_what_cannot_be_ended_is_named(cluster: Abandoned) -> None:
    """No other scheduler runs beside it."""
    cluster.fault = lambda what: "silent" if what == "signal" else ""
    with pytest.raises(BackendError, match="cannot be ended: replica 0 of job left") as refused:
        cluster.recover({KEPT[:2]}, 0.0)
    assert "kept" not in str(refused.value)
    assert cluster.forgotten == []
    assert Signal.KILL not in cluster.there[LEFT].told
