"""The training loop that survives stops: samples, batch sizes, epochs, step boundaries."""
