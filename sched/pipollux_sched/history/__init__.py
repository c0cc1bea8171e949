"""A scheduler's history as a workload, and its actual outcome for comparison."""
