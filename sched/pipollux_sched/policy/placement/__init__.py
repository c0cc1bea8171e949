"""Which nodes replicas go to."""
