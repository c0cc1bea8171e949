"""What the scheduler remembers: jobs, hints, allocations, progress and events, in a database."""

from __future__ import annotations

from .errors import (
    ConflictError,
    JobExistsError,
    StaleGenerationError,
    StoreError,
    StoreTakenError,
    StoreUnavailableError,
    UnknownJobError,
    UnknownNodeError,
)
from .hints import ToldHints
from .job_list import Holder, JobLine, JobOrder, JobPage, JobQuery, ListedPhase
from .journal import Change
from .overview import Glance, LaunchCounts, NoisePoint, Overview
from .records import GenerationRecord, JobRecord, NodeCondition, NodeRecord, Point, Timeline
from .replicas import Discovery, ReplicaAddresses, UnknownReplicaError
from .restart_cost import moving_average
from .state_dir import ServerInfo, StateDir, StateDirError
from .store import Store

__all__ = [
    "Change",
    "ConflictError",
    "Discovery",
    "GenerationRecord",
    "Glance",
    "Holder",
    "JobExistsError",
    "JobLine",
    "JobOrder",
    "JobPage",
    "JobQuery",
    "JobRecord",
    "LaunchCounts",
    "ListedPhase",
    "NodeCondition",
    "NodeRecord",
    "NoisePoint",
    "Overview",
    "Point",
    "ReplicaAddresses",
    "ServerInfo",
    "StaleGenerationError",
    "StateDir",
    "StateDirError",
    "Store",
    "StoreError",
    "StoreTakenError",
    "StoreUnavailableError",
    "Timeline",
    "ToldHints",
    "UnknownJobError",
    "UnknownNodeError",
    "UnknownReplicaError",
    "moving_average",
]
