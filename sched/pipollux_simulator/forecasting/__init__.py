"""Forecasts: when the jobs of a cluster start and end, from simulations of its present state."""
