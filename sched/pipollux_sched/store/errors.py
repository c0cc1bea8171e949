"""What can go wrong with the store, as errors whose text is one sentence for the user."""

from __future__ import annotations

from pipollux_sched.errors import SchedulerError


class StateDirError(SchedulerError):
    """The state directory cannot be used; the text is one sentence for the user."""


class StoreError(SchedulerError):
    """The store cannot do what was asked; the text is one sentence for the user."""


class StoreUnavailableError(StoreError):
    """The database does not answer, is busy for too long, or has no room; later it may again."""


class StoreTakenError(StoreError):
    """Another scheduler serves the store."""


class UnknownJobError(StoreError):
    """No job has this name."""


class UnknownNodeError(StoreError):
    """No node has this name."""


class ConflictError(StoreError):
    """What was asked does not fit the present state of a job."""


class JobExistsError(ConflictError):
    """A job of this name is already there."""


class JobEndedError(ConflictError):
    """What was asked of a job is only for one that has not ended."""


class JobLivesError(ConflictError):
    """What was asked of a job is only for one that has ended."""


class StaleGenerationError(ConflictError):
    """The sender belongs to a generation that is no longer the present one."""
