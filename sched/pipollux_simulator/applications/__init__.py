"""Applications of simulated jobs: their models, and how fast they train."""
