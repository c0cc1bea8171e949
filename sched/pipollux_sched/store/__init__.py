"""What the scheduler remembers: jobs, hints, allocations, progress and events, in SQLite."""

from __future__ import annotations

from .database import (
    ConflictError,
    JobExistsError,
    StaleGenerationError,
    StoreError,
    UnknownJobError,
    UnknownNodeError,
)
from .journal import Change
from .records import GenerationRecord, JobRecord, NodeCondition, NodeRecord, Point, Timeline
from .state_dir import ServerInfo, StateDir, StateDirError
from .store import Store, moving_average

__all__ = [
    "Change",
    "ConflictError",
    "GenerationRecord",
    "JobExistsError",
    "JobRecord",
    "NodeCondition",
    "NodeRecord",
    "Point",
    "ServerInfo",
    "StaleGenerationError",
    "StateDir",
    "StateDirError",
    "Store",
    "StoreError",
    "Timeline",
    "UnknownJobError",
    "UnknownNodeError",
    "moving_average",
]
