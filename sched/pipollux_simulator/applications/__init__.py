"""Applications of simulated jobs: what they train, and how fast."""
