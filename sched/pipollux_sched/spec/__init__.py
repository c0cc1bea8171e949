"""Specifications that users write: jobs, clusters, and the limits of both."""
