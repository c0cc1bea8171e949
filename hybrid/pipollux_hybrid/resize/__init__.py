"""Who takes part in a job while it trains: replicas that join and leave."""
