"""Checkpoints: the state that outlives a restart, and how it reaches the disk."""
