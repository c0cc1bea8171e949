"""Read model of jobs, nodes and events: one answer to each question."""
