"""Trace-driven simulator of a cluster: policies tried on workloads, in seconds instead of days."""

from __future__ import annotations

from .application import Application, JobModel, Running, StepTimes

__all__ = ["Application", "JobModel", "Running", "StepTimes"]
