"""What a job tells the scheduler about itself, and what the scheduler makes of it."""
