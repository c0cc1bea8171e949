"""The scheduler's database: jobs, hints, allocations, progress, restart costs and events."""

from __future__ import annotations

from .attempts import AttemptCounts, moving_average
from .deletion import PendingDeletion
from .errors import (
    ConflictError,
    JobEndedError,
    JobExistsError,
    JobUnfinishedError,
    StaleAttemptError,
    StateDirError,
    StoreError,
    StoreTakenError,
    StoreUnavailableError,
    TeamFullError,
    UnknownJobError,
    UnknownNodeError,
    UnknownTokenError,
)
from .families import Predecessor
from .heartbeats import KeptHeartbeat, ReceivedHeartbeat
from .hints import ReceivedHints
from .job_cache import JobCache
from .job_list import Holder, JobOrder, JobPage, JobQuery, JobSummary, ListedPhase
from .journal import Change
from .queries import CompletedRecord, Glance, NoisePoint, Overview
from .records import AttemptRecord, JobRecord, NodeCondition, NodeRecord, Point, Timeline
from .replicas import Discovery, ReplicaAddresses, UnknownReplicaError
from .reports import ReceivedReport
from .state_dir import ServerInfo, StateDir
from .store import Store
from .submissions import Submission

__all__ = [
    "AttemptCounts",
    "AttemptRecord",
    "Change",
    "CompletedRecord",
    "ConflictError",
    "Discovery",
    "Glance",
    "Holder",
    "JobCache",
    "JobEndedError",
    "JobExistsError",
    "JobOrder",
    "JobPage",
    "JobQuery",
    "JobRecord",
    "JobSummary",
    "JobUnfinishedError",
    "KeptHeartbeat",
    "ListedPhase",
    "NodeCondition",
    "NodeRecord",
    "NoisePoint",
    "Overview",
    "PendingDeletion",
    "Point",
    "Predecessor",
    "ReceivedHeartbeat",
    "ReceivedHints",
    "ReceivedReport",
    "ReplicaAddresses",
    "ServerInfo",
    "StaleAttemptError",
    "StateDir",
    "StateDirError",
    "Store",
    "StoreError",
    "StoreTakenError",
    "StoreUnavailableError",
    "Submission",
    "TeamFullError",
    "Timeline",
    "UnknownJobError",
    "UnknownNodeError",
    "UnknownReplicaError",
    "UnknownTokenError",
    "moving_average",
]
