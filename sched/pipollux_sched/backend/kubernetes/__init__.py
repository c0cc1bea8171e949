"""Kubernetes: a pod per replica, under a custom resource per job."""
