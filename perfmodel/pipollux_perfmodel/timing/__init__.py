"""Step times: GPipe over the stages, the network, the optimizer."""
