"""Gradients and buffers made equal across replicas: what is sent, and when."""
