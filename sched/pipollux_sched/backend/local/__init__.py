"""Replicas as processes of this machine: one torchrun agent each."""
