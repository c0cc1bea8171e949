"""Helpers that know nothing of jobs: units, files, signals, threads."""
