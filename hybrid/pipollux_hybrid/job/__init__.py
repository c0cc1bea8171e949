"""The process in its job: environment, peers, signals, the batch under way."""
