"""Revisions of the store's tables, one module each; each names its predecessor."""
