"""The process within its job: environment, peers, signals, current batch."""
