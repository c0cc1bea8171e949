"""Elastic resizes: replicas join and leave a job while it trains."""
