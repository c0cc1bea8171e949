"""Asking a running scheduler over HTTP, from this machine or another."""
