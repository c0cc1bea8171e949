"""Goodput: training progress per second, and the configuration with the most of it."""
