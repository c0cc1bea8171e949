"""Backends: engines that run the replicas of jobs."""

from __future__ import annotations

from .base import BackendError, Engine, Launch, Node, ReplicaKey, ReplicaProgram
from .generations import Generations
from .report import Report, Running

__all__ = [
    "BackendError",
    "Engine",
    "Generations",
    "Launch",
    "Node",
    "ReplicaKey",
    "ReplicaProgram",
    "Report",
    "Running",
]
