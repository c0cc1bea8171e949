"""Generators of the reference pages: each page from the code that it describes."""
