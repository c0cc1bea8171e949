"""Cuts of layers into stages, and the time and memory of each stage."""
