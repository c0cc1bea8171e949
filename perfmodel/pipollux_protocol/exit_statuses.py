"""Exit statuses of a job's processes, and of the agent that runs them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "CHECKPOINT_LOST",
    "DAEMONISED",
    "DONE",
    "INTERRUPTED",
    "KILLED",
    "REPLACED",
    "STATUSES",
    "STOPPED",
    "ExitStatus",
]


class ExitStatus(NamedTuple):
    """An exit status, and what the scheduler does about it."""

    status: int
    meaning: str
    consequence: str


FAILURE = "a failure: the job is restarted, at most `max_restarts` times"
DONE = 0
DAEMONISED = 70  # EX_SOFTWARE of sysexits.h
CHECKPOINT_LOST = 73  # EX_CANTCREAT
REPLACED = 75  # EX_TEMPFAIL
INTERRUPTED = 130  # 128 + SIGINT
KILLED = 137  # 128 + SIGKILL
STOPPED = 143  # 128 + SIGTERM

STATUSES = (
    ExitStatus(DONE, "the script ended", "the job is complete when all replicas have ended"),
    ExitStatus(
        DAEMONISED,
        "the script ended, but processes that it had forked still ran; the agent ended them",
        FAILURE,
    ),
    ExitStatus(
        CHECKPOINT_LOST,
        "the script ended, or was asked to stop, and the last checkpoint was not written",
        FAILURE,
    ),
    ExitStatus(
        REPLACED,
        "the run is over for the scheduler, which has started another one",
        "none: the scheduler has started others in its place",
    ),
    ExitStatus(
        INTERRUPTED,
        "the same as 143, after Ctrl-C",
        "none: a script that is started by hand",
    ),
    ExitStatus(KILLED, "the process was killed, often for want of memory", "the replica is lost"),
    ExitStatus(
        STOPPED,
        "the replicas were asked to stop, agreed on a step and saved",
        f"none, if it was asked for; else {FAILURE}",
    ),
)
"""All that have a meaning; any other is a failure of the script."""
