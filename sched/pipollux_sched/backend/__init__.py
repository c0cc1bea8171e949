"""Backends: engines that run the replicas of jobs."""

from __future__ import annotations

from .base import BackendError, Engine, Launch, Node, ReplicaKey, ReplicaProgram
from .replica_groups import ReplicaGroupManager
from .report import Report, Running

__all__ = [
    "BackendError",
    "Engine",
    "Launch",
    "Node",
    "ReplicaGroupManager",
    "ReplicaKey",
    "ReplicaProgram",
    "Report",
    "Running",
]
