"""Allocation decisions: read the state, ask the policy, store what each job gets."""
