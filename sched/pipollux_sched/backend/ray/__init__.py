"""The Ray engine: replicas as processes below actors of a Ray cluster."""
