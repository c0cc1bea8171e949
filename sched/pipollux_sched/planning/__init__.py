"""Plans and explanations: what would be decided, and why, without acting."""
