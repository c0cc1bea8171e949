"""Gradients and buffers made equal across replicas."""
