"""One batch through K stages: micro-batches, order, recomputation; independent of replicas."""
