"""Helpers shared by all packages and independent of jobs: text, units, files."""
