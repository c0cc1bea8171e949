"""Serving until somebody wants it to end, or another scheduler has taken the store over."""

from __future__ import annotations

from .interruption import Interruption
from .service import Scheduler
from .store import StoreTakenError, StoreUnavailableError

LOOK_INTERVAL = 0.5
"""Seconds between two looks at whether the store is still this scheduler's."""


def run(scheduler: Scheduler) -> None:
    """Serve until SIGINT or SIGTERM; at a second one jobs are no longer given time to save.

    Raises:
        StoreTakenError: see `serve_until`.
    """
    with Interruption() as interruption:
        scheduler.start()
        serve_until(scheduler, interruption)
        scheduler.stop(hurry=lambda: interruption.count > 1)


def serve_until(scheduler: Scheduler, interruption: Interruption) -> None:
    """Wait for a signal; the scheduler still serves when this returns.

    Raises:
        StoreTakenError: another scheduler has taken the store over. This one has ended then; what
            ran of jobs is left to the other.
    """
    while not interruption.wait(LOOK_INTERVAL):
        try:
            scheduler.store.check_claim()
        except StoreUnavailableError:
            continue  # whose it is cannot be asked; it goes on when the database is back
        except StoreTakenError:
            scheduler.abandon()
            raise
