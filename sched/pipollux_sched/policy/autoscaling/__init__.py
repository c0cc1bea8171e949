"""How many nodes a cluster should have."""
