"""Baseline policies: FIFO, Tiresias, Optimus."""
