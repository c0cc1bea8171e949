"""A run as a report reads it: its events, and the records built from them."""
