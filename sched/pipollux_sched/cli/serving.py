"""Serve until a signal, a failure, the loss of the nodes, or a takeover by another scheduler."""

from __future__ import annotations

import logging

from pipollux_sched.errors import SchedulerError
from pipollux_sched.scheduler import Scheduler
from pipollux_sched.store import StoreTakenError, StoreUnavailableError
from pipollux_sched.utils.signals import Interruption

_LOG = logging.getLogger(__name__)
LOOK_INTERVAL = 0.5
"""Seconds between two checks that the store is still this scheduler's."""


class SchedulerFailedError(SchedulerError):
    """The scheduler cannot continue; the text gives the reason in one sentence."""


class ClusterLostError(SchedulerError):
    """The cluster is lost for good, and the scheduler has ended; the text gives the reason."""


def run(scheduler: Scheduler) -> None:
    """Serve until SIGINT or SIGTERM; a second signal ends jobs without saving."""
    with Interruption() as interruption:
        scheduler.start()
        serve_until(scheduler, interruption)
        scheduler.stop(hurry=lambda: interruption.count > 1)


def serve_until(scheduler: Scheduler, interruption: Interruption) -> None:
    """Wait for a signal; the scheduler still runs on return.

    Raises:
        StoreTakenError: another scheduler has taken over the store. This one has ended and leaves
            its running jobs to the other.
        SchedulerFailedError: a thread of the scheduler has died. The others have ended; jobs keep
            running, and the next scheduler adopts them.
        ClusterLostError: the nodes are lost for good. The scheduler has ended as on a signal; its
            jobs resume when it is started again.
    """
    while not interruption.wait(LOOK_INTERVAL):
        try:
            scheduler.store.check_leader_lock()
        except StoreUnavailableError:
            pass  # the database is unavailable; retry later
        except StoreTakenError:
            scheduler.abandon()
            raise
        lost = scheduler.lost
        if lost is not None:
            _LOG.error("%s: jobs save if they still can, and the scheduler ends", lost)
            scheduler.stop(hurry=lambda: interruption.count > 0)
            raise ClusterLostError(
                f"{scheduler.lost or lost}; jobs resume from their checkpoints when a scheduler is "
                f"started with the state directory {scheduler.state_dir.path} in a new one"
            )
        failure = scheduler.failure
        if failure is not None:
            scheduler.abandon()
            raise SchedulerFailedError(
                f"{failure}, so the scheduler ends; jobs run on, start it again to manage them"
            )
