"""What users declare: jobs, clusters, and the limits of both."""
