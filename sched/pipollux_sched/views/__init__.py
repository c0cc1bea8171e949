"""What the scheduler tells of its jobs, nodes and events: one answer to each question."""
