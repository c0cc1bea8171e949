"""The cluster: policy, store, supervisor, backends, and the command line `pipollux`."""
