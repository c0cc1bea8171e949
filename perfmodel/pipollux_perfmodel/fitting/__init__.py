"""Parameters of step times, from what a job measured."""
