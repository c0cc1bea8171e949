"""What the store forgets as it ages, and that nothing else is lost with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from pipollux_sched.lifecycle import Allocate
from pipollux_sched.store import Point, Store
from pipollux_sched.store.database import Database
from pipollux_sched.store.retention import BATCH, prune
from pipollux_sched.store.tables import EventRow, PointRow
from tests.extent import turns
from tests.sched.store.stores import DATABASES

HOUR, DAY = 3600, 86400
START = 1000 * DAY
"""A whole number of days, so that stretches of time begin where the tests do."""


def point(step: int, time: float) -> Point:
    sizes = {"batch_size": 8, "atomic_bsz": 8, "accum_steps": 0, "num_replicas": 1}
    measured = {"predicted_step_time": None, "goodput": 70.0, "efficiency": 0.9, "loss": 1.5}
    told = {"time": time, "step": step, "epoch": 0, "samples": 8 * step}
    return Point(**told, **sizes, **measured, step_time=0.1)


def make_store(place: Path | str, jobs: Iterable[str] = ("toy",)) -> None:
    with Store(place, create=True, clock=lambda: START) as store:
        for name in jobs:
            store.submit(name, {"name": name}, "token", max_restarts=1)
            store.transition(name, Allocate(["a"], "free"))


def tell(database: Database, kind: str, times: Iterable[float], job: str = "toy") -> None:
    """Let a job have told something at some times; quicker than a report each."""
    with database.write() as session:
        rows = [EventRow(time=time, type=kind, job=job, attempt=1, data={}) for time in times]
        session.add_all(rows)
        session.flush()
        if kind == "progress":
            for row in rows:
                told = vars(point(int(row.time - START), row.time))
                session.add(PointRow(event=row.id, job=job, **told))


def times(store: Store, kind: str, job: str = "toy") -> list[float]:
    return [event["time"] - START for event in store.events(job=job, types=[kind])]


def every(seconds: int, begin: float, end: float) -> list[float]:
    return [START + time for time in range(int(begin), int(end), seconds)]


@pytest.mark.parametrize(("place", "at_once"), turns(DATABASES, [True, False]), indirect=["place"])
def test_progress_is_thinned_as_it_ages(place: Path | str, at_once: bool) -> None:
    """To the last of every minute, of every ten, of every hour; in one go or as time passes."""
    make_store(place)
    database = Database(place, create=False)
    old, day, new = 31 * DAY, 3 * HOUR, 2 * HOUR
    spans = [(300, 0, day), (20, old, old + new), (20, old + DAY, old + DAY + new)]
    for seconds, begin, end in spans:
        tell(database, "progress", every(seconds, begin, end))
        if not at_once:
            prune(database, START + end, patience=60)
    now = old + DAY + new
    assert (prune(database, START + now, patience=60) > 0) is at_once
    assert prune(database, START + now, patience=60) == 0
    database.close()
    with Store(place) as store:
        assert times(store, "progress") == [
            *range(HOUR - 300, day, HOUR),
            *range(old + 580, old + new, 600),
            *range(old + DAY + 40, old + DAY + HOUR, 60),
            *range(old + DAY + HOUR + 20, now, 20),
        ]
        assert len(store.events(types=["submitted", "allocated"])) == 2
        assert store.last_points()["toy"].step == now - 20


def test_hints_and_timelines_are_not_for_ever(place: Path | str) -> None:
    make_store(place, ["toy", "other"])
    database = Database(place, create=False)
    for kind in ("hints", "timeline"):
        tell(database, kind, every(30, 0, 2 * HOUR))
    tell(database, "hints", every(30, 0, HOUR), job="other")
    tell(database, "progress", every(HOUR, 0, 2 * HOUR))
    prune(database, START + 6 * DAY, patience=60)
    with Store(place) as store:
        assert times(store, "hints") == times(store, "timeline") == [*range(570, 2 * HOUR, 600)]
        prune(database, START + 8 * DAY, patience=60)
        assert times(store, "hints") == [*range(570, 2 * HOUR, 600)]
        assert times(store, "timeline") == [2 * HOUR - 30]
        prune(database, START + 31 * DAY, patience=60)
        assert times(store, "hints") == times(store, "timeline") == [2 * HOUR - 30]
        assert times(store, "hints", "other") == [HOUR - 30]
        assert times(store, "progress") == [0, HOUR]
    database.close()


def test_a_clock_that_was_wrong_is_not_in_the_way(place: Path | str) -> None:
    """What is dated in the future is passed over, and what comes after it is thinned."""
    make_store(place)
    database = Database(place, create=False)
    tell(database, "progress", [START + 3650 * DAY, *every(1, 0, 120)])
    prune(database, START + 2 * HOUR, patience=60)
    with Store(place) as store:
        assert times(store, "progress") == [3650 * DAY, 59, 119]
    database.close()


def test_small_transactions_that_disturb_nobody(place: Path | str) -> None:
    """Between two of them others write; who reads sees its moment of the store until it ends."""
    make_store(place)
    database, other = Database(place, create=False), Database(place, create=False)
    for begin in range(0, 5 * BATCH, BATCH):
        tell(database, "hints", every(1, begin, begin + BATCH))
    began = database.version
    with other.read() as session:
        before = session.query(EventRow).count()
        assert prune(database, START + DAY, patience=0) < BATCH
        assert database.version == began + 1
        assert prune(database, START + DAY, patience=60) > 0
        assert session.query(EventRow).count() == before
    assert database.version > began + 5
    with other.read() as session:
        kinds = Counter(row.type for row in session.query(EventRow))
    assert kinds == {"submitted": 1, "allocated": 1, "hints": -(-5 * BATCH // 60)}
    for opened in (database, other):
        opened.close()


def test_the_store_prunes_itself_by_its_method(place: Path | str) -> None:
    now = [float(START)]
    with Store(place, create=True, clock=lambda: now[0]) as store:
        store.submit("toy", {}, "token", 0)
        store.transition("toy", Allocate(["a"], "free"))
        for step in range(3):
            store.add_report("toy", 1, [point(step, now[0])])
            now[0] += 10
        assert store.num_bytes() > 4096
        assert store.prune(START + HOUR - 1) == 0
        assert store.prune(START + 2 * HOUR) == 2
        assert [event["step"] for event in store.events(types=["progress"])] == [2]
