"""The simulated cluster: its jobs, its failures, its results."""
