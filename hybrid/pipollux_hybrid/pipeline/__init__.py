"""One batch through K stages; knows no replicas."""
