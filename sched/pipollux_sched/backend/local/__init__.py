"""Generations as processes of this machine: one torchrun agent per replica."""
