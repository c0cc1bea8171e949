"""What simulated jobs train, and how fast that is."""
