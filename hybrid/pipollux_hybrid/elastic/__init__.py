"""The elastic training loop: samples, batch sizes, epochs, step boundaries."""
