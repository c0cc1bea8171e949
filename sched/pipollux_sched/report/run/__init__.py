"""The records of a run: its events, and the state built from them."""
