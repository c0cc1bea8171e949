"""Specifications of jobs and clusters, and their limits."""
