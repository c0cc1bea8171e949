"""Backends: engines that run the replicas of jobs."""

from __future__ import annotations

from pipollux_sched.backend.local.backend import LocalBackend, check_local

from .base import Backend, BackendError, Node, ReplicaProgram, Report, Running

__all__ = [
    "Backend",
    "BackendError",
    "LocalBackend",
    "Node",
    "ReplicaProgram",
    "Report",
    "Running",
    "check_local",
]
