"""The cluster: policies, store, server, backends, and the command line `pipollux`."""
