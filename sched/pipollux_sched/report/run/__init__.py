"""A run as a report reads it: its events, and the state that they lead to."""
