"""Workloads: the arrivals of jobs."""
