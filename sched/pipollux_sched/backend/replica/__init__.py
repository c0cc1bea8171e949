"""What runs on a replica's machine, and how engines start it there."""
