"""The full-screen view of a running cluster."""
