"""Receivers, and a notifier over a store whose time is moved by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from pipollux_sched.lifecycle import Allocate, Exited, Outcome
from pipollux_sched.notifications.courier import Couriers
from pipollux_sched.notifications.notifier import Notifier, NotifyOptions
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import Store
from pipollux_sched.store.submissions import Submission
from tests.sched.store.stores import Clock
from tests.waiting import until

from .receivers import SECRET, Receiver


class Outbox:
    """A notifier whose steps the test takes."""

    def __init__(
        self, store: Store, clock: Clock, couriers: Couriers | None, **options: Any
    ) -> None:
        self.store, self.clock, self._couriers = store, clock, couriers
        self._options = NotifyOptions(**{"hosts": ("127.0.0.1",), **options})
        self.notifier = self._make()

    def _make(self) -> Notifier:
        waits, ending = lambda _job: "2 slots", threading.Event()
        return Notifier(self.store, self._options, waits, ending, self._couriers)

    def restart(self) -> None:
        """Go on with another notifier, as another scheduler does."""
        self.notifier.close()
        self.notifier = self._make()

    def submit(self, name: str, *entries: dict[str, Any], **fields: Any) -> None:
        values = {"name": name, "script": "train.py", "notify": entries, **fields}
        spec = JobSpec.model_validate(values)
        plain = [entry.revealed() for entry in spec.notify]
        job = Submission(name, spec.model_dump(mode="json"), "token", 0, notify=plain)
        self.store.submit_all([job])

    def start(self, name: str) -> None:
        self.store.transition(name, Allocate(["node-a"], "starts on 1 replica on node-a"))

    def preempt(self, name: str) -> None:
        self.start(name)
        self.store.transition(name, Allocate([], "team text takes its slots back"))
        attempt = self.store.job(name).state.attempt
        self.store.transition(name, Exited(attempt, Outcome.STOPPED, step=3))

    def end(self, name: str, outcome: Outcome = Outcome.COMPLETE, message: str = "") -> None:
        self.start(name)
        attempt = self.store.job(name).state.attempt
        self.store.transition(name, Exited(attempt, outcome, 9, 3, message=message))

    def deliver(self) -> None:
        """Deliver all that is due, and return when nothing is under way."""
        self.notifier.collector.look()
        self.notifier.collector.collect()
        while self.store.notifications.due((), 100):
            self.notifier.deliver()
            until(lambda: not self.notifier.busy, "nothing is under way")

    def states(self) -> Sequence[str]:
        return [one.state.value for one in self.store.notifications.recent(1000)]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def couriers() -> Iterator[Couriers]:
    """One process that tests share, as it takes a while to start."""
    couriers = Couriers(["127.0.0.1"])
    assert couriers.send({"apprise": "json://localhost", "check": True}).error is None
    assert couriers.num_processes == 1
    yield couriers
    couriers.close()


@pytest.fixture
def make_outbox(store: Store, clock: Clock, couriers: Couriers) -> Iterator[Callable[..., Outbox]]:
    made: list[Outbox] = []

    def make(**options: Any) -> Outbox:
        own = bool({"hosts", "limit"} & options.keys())
        options = {"most_at_once": 4 if own else 1, **options}
        made.append(Outbox(store, clock, None if own else couriers, **options))
        return made[-1]

    yield make
    for outbox in made:
        outbox.notifier.close()


@pytest.fixture
def outbox(make_outbox: Callable[..., Outbox]) -> Outbox:
    return make_outbox()


def hook(receiver: Receiver, *events: str, **fields: Any) -> dict[str, Any]:
    """An entry of a job's `notify`."""
    events = events or ("completed", "failed")
    return {"webhook": receiver.url, "secret": SECRET, "events": events, **fields}
