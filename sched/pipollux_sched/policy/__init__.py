"""Allocation policies: pure functions from jobs, nodes and allocations to new allocations."""

from __future__ import annotations

from .job_info import DEFAULT_RESTART_SECONDS, JobInfo, NodeInfo, SpeedupCallable
from .pollux import PolluxPolicy

__all__ = ["DEFAULT_RESTART_SECONDS", "JobInfo", "NodeInfo", "PolluxPolicy", "SpeedupCallable"]
