"""Allocation decisions: read the state, call the policy, store the result."""
