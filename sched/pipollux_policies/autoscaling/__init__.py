"""The number of nodes a cluster should have."""
