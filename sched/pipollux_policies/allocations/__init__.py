"""Allocations: their form, the rules that all of them keep, and their value."""
