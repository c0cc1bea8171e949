"""What outlives a restart, and how it reaches the disk."""
