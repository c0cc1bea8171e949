"""Fits: parameters of step times, from a job's measurements."""
