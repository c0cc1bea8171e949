"""Workloads: which jobs arrive when."""
