"""Placement: which nodes replicas go to."""
