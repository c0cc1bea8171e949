"""Synchronisation of gradients and buffers across replicas."""
