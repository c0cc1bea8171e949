"""Step times: GPipe or 1F1B over the stages, the network, the optimizer."""
