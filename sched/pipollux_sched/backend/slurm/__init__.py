"""Jobs as steps of Slurm allocations: a step per pipeline replica."""
