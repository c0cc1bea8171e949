"""Forecasts of starts and ends of jobs: in the background, and before a submission."""
