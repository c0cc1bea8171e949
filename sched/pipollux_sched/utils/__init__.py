"""Helpers of the scheduler: YAML files, signals, threads."""
