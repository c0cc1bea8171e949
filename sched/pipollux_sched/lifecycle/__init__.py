"""The life of a job, as a pure function of its state and of what happens to it."""

from __future__ import annotations

from .events import (
    Action,
    Allocate,
    Cancel,
    Event,
    Exited,
    FirstStep,
    Launch,
    Record,
    Recover,
    Retry,
    RetryAfter,
    Shutdown,
    Started,
    Stop,
    Submit,
)
from .state import Condition, Intent, JobState, Outcome, Phase
from .transitions import BACKOFF_LIMIT, Transition, advance, backoff, with_condition

__all__ = [
    "BACKOFF_LIMIT",
    "Action",
    "Allocate",
    "Cancel",
    "Condition",
    "Event",
    "Exited",
    "FirstStep",
    "Intent",
    "JobState",
    "Launch",
    "Outcome",
    "Phase",
    "Record",
    "Recover",
    "Retry",
    "RetryAfter",
    "Shutdown",
    "Started",
    "Stop",
    "Submit",
    "Transition",
    "advance",
    "backoff",
    "with_condition",
]
