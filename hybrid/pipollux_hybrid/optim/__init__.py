"""The optimizer under a changing batch size."""
