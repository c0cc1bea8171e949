"""How long a step takes: GPipe over the stages, the network, the optimizer."""
