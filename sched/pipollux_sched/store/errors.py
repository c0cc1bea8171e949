"""Errors of the store; the text of each is one sentence for the user."""

from __future__ import annotations

from pipollux_sched.errors import SchedulerError


class StateDirError(SchedulerError):
    """The state directory cannot be used; the text is one sentence for the user."""


class StoreError(SchedulerError):
    """The store cannot carry out a request; the text is one sentence for the user."""


class StoreUnavailableError(StoreError):
    """The database is unavailable, busy for too long, or full; a retry may succeed."""


class StoreTakenError(StoreError):
    """Another scheduler serves the store."""


class UnknownJobError(StoreError):
    """No job has this name."""


class DependencyError(StoreError):
    """A job waits for one that is not known, or that has ended otherwise."""


class UnknownNodeError(StoreError):
    """No node has this name."""


class UnknownTokenError(StoreError):
    """No token has this name."""


class UnknownChannelError(StoreError):
    """No channel of notifications has this name."""


class ConflictError(StoreError):
    """The request conflicts with the current state of a job."""


class JobExistsError(ConflictError):
    """A job of this name exists already."""


class TokenExistsError(ConflictError):
    """The user has a token already."""


class ChannelExistsError(ConflictError):
    """The user has a channel of this name already."""


class TeamFullError(ConflictError):
    """The team has reached its limit of unfinished jobs."""


class JobEndedError(ConflictError):
    """The request requires a job that has not ended."""


class JobUnfinishedError(ConflictError):
    """The request requires a job that has ended."""


class StaleAttemptError(ConflictError):
    """The sender belongs to an attempt that is no longer the current one."""
