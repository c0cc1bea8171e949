"""The simulated cluster: its jobs, its failures, what came of them."""
