"""Helpers that all packages share and that know nothing of jobs: text, units, files."""
