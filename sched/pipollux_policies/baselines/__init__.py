"""Policies to compare with: FIFO, Tiresias, Optimus."""
