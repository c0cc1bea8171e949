"""The scheduler's database: jobs, hints, allocations, progress, restart costs and events."""

from __future__ import annotations

from .attempts import AttemptCounts, moving_average
from .errors import (
    ChannelExistsError,
    ConflictError,
    DependencyError,
    JobEndedError,
    JobExistsError,
    JobUnfinishedError,
    StaleAttemptError,
    StateDirError,
    StoreError,
    StoreTakenError,
    StoreUnavailableError,
    TeamFullError,
    UnknownChannelError,
    UnknownJobError,
    UnknownNodeError,
    UnknownTokenError,
)
from .families import Predecessor
from .forecasts import PastForecast, StoredForecast
from .heartbeats import KeptHeartbeat, ReceivedHeartbeat
from .job_cache import JobCache
from .job_list import Holder, JobOrder, JobQuery, JobSummary, ListedPhase
from .journal import RunTime
from .notifications import DeliveryState, Notification, NotifyRule
from .queries import CompletedRecord, Glance, NoisePoint
from .records import AttemptRecord, JobRecord, NodeCondition, NodeRecord, Point, Timeline
from .replicas import Discovery, UnknownReplicaError
from .reports import MetricValue, ReceivedHints, ReceivedReport
from .state_dir import ServerInfo, StateDir
from .store import Store
from .submissions import Submission
from .sweeps import Curve, SweepSummary, TrialRecord, TrialState

__all__ = [
    "AttemptCounts",
    "AttemptRecord",
    "ChannelExistsError",
    "CompletedRecord",
    "ConflictError",
    "Curve",
    "DeliveryState",
    "DependencyError",
    "Discovery",
    "Glance",
    "Holder",
    "JobCache",
    "JobEndedError",
    "JobExistsError",
    "JobOrder",
    "JobQuery",
    "JobRecord",
    "JobSummary",
    "JobUnfinishedError",
    "KeptHeartbeat",
    "ListedPhase",
    "MetricValue",
    "NodeCondition",
    "NodeRecord",
    "NoisePoint",
    "Notification",
    "NotifyRule",
    "PastForecast",
    "Point",
    "Predecessor",
    "ReceivedHeartbeat",
    "ReceivedHints",
    "ReceivedReport",
    "RunTime",
    "ServerInfo",
    "StaleAttemptError",
    "StateDir",
    "StateDirError",
    "Store",
    "StoreError",
    "StoreTakenError",
    "StoreUnavailableError",
    "StoredForecast",
    "Submission",
    "SweepSummary",
    "TeamFullError",
    "Timeline",
    "TrialRecord",
    "TrialState",
    "UnknownChannelError",
    "UnknownJobError",
    "UnknownNodeError",
    "UnknownReplicaError",
    "UnknownTokenError",
    "moving_average",
]
