"""Fits of step time parameters to a job's measurements."""
