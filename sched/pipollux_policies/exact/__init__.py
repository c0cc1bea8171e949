"""The policy that solves the allocation problem exactly."""
