"""Training progress per second, and the configuration that makes most of it."""
