"""Errors of a scheduler, its state or its input that a user can act on.

    PipolluxError               (`pipollux_perfmodel.errors`)
    ├── SchedulerError          also RuntimeError
    │   ├── StoreError, StateDirError, BackendError, HttpServerError, UnavailableError, …
    │   └── ClientError
    ├── InputError              also ValueError; a command that meets it exits with 2
    │   └── SpecError, ModelingError, EventLogError, TraceError, …
    └── PlanError, SimulationError, ExpanderError, CommandError, …

The command line catches the root, and prints one line per entry of its `problems`.
"""

from __future__ import annotations

from pipollux_perfmodel.errors import InputError, PipolluxError

__all__ = ["InputError", "PipolluxError", "SchedulerError"]


class SchedulerError(PipolluxError, RuntimeError):
    """An error of a running scheduler."""
