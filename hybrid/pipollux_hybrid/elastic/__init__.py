"""The loop that survives stops."""
