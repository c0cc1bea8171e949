"""Hints: what a job tells the scheduler about itself, and the speedups computed from it."""
