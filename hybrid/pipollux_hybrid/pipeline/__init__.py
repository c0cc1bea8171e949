"""One batch through K stages: micro-batches, their order, recomputation; knows no replicas."""
