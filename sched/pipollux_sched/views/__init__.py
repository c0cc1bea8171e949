"""Read model: views of jobs, nodes, teams and events, for the REST interface and commands."""
