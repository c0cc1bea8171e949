"""Programs on a replica's machine, and how engines start them."""
