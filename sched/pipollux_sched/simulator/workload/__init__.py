"""Which jobs arrive when."""
