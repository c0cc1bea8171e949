"""Checkpoints: states that survive a restart, and their storage."""
