"""Measurement of step times, fits, progress display, and reports to the scheduler."""
