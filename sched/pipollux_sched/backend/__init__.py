"""Engines that carry allocations out."""

from __future__ import annotations

from .base import Backend, BackendError, Node, Report, Running, Workload
from .local import LocalBackend, check_local

__all__ = [
    "Backend",
    "BackendError",
    "LocalBackend",
    "Node",
    "Report",
    "Running",
    "Workload",
    "check_local",
]
