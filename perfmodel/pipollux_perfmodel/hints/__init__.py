"""Hints: the state that a job reports to the scheduler, and the speedups computed from it."""
