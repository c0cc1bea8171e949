"""Goodput: training progress per second, and the configuration that maximizes it."""
