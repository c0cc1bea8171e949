"""Plans and explanations: decisions and their reasons, without acting."""
