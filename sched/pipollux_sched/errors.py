"""The errors of a running scheduler that a user can do something about.

    SchedulerError
    ├── StoreError              (.store)    UnknownJobError, ConflictError: JobExistsError, …
    ├── StateDirError           (.store)
    ├── BackendError            (.backend)
    ├── HttpServerError         (.http_server)
    ├── UnavailableError        (.control)
    ├── TooManyRequestsError, BusyError   (.supervisor)
    └── ClientError             (.client)

What is wrong with a file is a `SpecError` (`.document`), what is wrong with a plan a `PlanError`.
"""

from __future__ import annotations


class SchedulerError(RuntimeError):
    """Something that a user can do something about; the text is one sentence that says what."""
