"""A scheduler's own history as a workload, and what really happened beside it."""
