"""Serving until somebody wants it to end, it cannot go on, or another scheduler has taken over."""

from __future__ import annotations

from pipollux_sched.errors import SchedulerError
from pipollux_sched.scheduler import Scheduler
from pipollux_sched.store import StoreTakenError, StoreUnavailableError
from pipollux_sched.utils.signals import Interruption

LOOK_INTERVAL = 0.5
"""Seconds between two looks at whether the store is still this scheduler's."""


class SchedulerFailedError(SchedulerError):
    """The scheduler cannot go on; the text is one sentence that says why."""


def run(scheduler: Scheduler) -> None:
    """Serve until SIGINT or SIGTERM; at a second one jobs are no longer given time to save.

    Raises:
        StoreTakenError: see `serve_until`.
        SchedulerFailedError: see `serve_until`.
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
        SchedulerFailedError: one of its threads has died. The others have ended then; what ran of
            jobs runs on, and the next scheduler takes it over.
    """
    while not interruption.wait(LOOK_INTERVAL):
        try:
            scheduler.store.check_leader_lock()
        except StoreUnavailableError:
            pass  # whose it is cannot be asked; it goes on when the database is back
        except StoreTakenError:
            scheduler.abandon()
            raise
        failure = scheduler.failure
        if failure is not None:
            scheduler.abandon()
            raise SchedulerFailedError(
                f"{failure}, so the scheduler ends; jobs run on, start it again to look after them"
            )
